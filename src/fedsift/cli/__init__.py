"""The command line: every command, its options and its output.

Commands
    ``entry.py`` registers them. ``run.py`` (run and resume), ``compare.py``, ``report.py``,
    ``reproduce.py``, ``rollback.py``, ``bench.py``, ``bounds.py``, ``advise.py``, ``frame.py``,
    ``data.py`` and ``deploy.py`` declare one each; they import torch only when they run.

Options
    ``options.py`` declares those of several commands. Methods, data sets and models are listed in
    ``catalog.json``, which ``catalog.py`` generates from their declarations. ``user_settings.py``
    adds the settings of the user's own methods. ``settings.py`` merges options with a TOML file.
    A new option of a run is a field of ``RunConfig`` (``runs/config.py``), with its help text in
    ``options.py``; then run ``python -m fedsift.cli.catalog``.

Work and output
    ``training.py``, ``comparison.py``, ``reports.py``, ``demo.py``, ``status.py`` and
    ``timings.py`` (with ``timed_models.py``) do the work. ``progress.py``, ``tables.py``,
    ``reproduce_tables.py`` and ``terminal.py`` print; ``exit_codes.py`` turns an exception into one
    line and an exit code.
"""

from __future__ import annotations


def main(words: list[str] | None = None) -> int:
    """Run a command and return its exit code."""
    from fedsift.cli.entry import main as run_command

    return run_command(words)

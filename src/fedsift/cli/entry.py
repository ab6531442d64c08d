"""The command ``fedsift``.

Importing this module imports no torch. Each command imports what it needs when it runs, so
``--help`` is fast.
"""

from __future__ import annotations

import sys
from io import TextIOWrapper
from typing import Annotated

import typer

import fedsift
from fedsift.cli.advise import advise
from fedsift.cli.bench import bench
from fedsift.cli.bounds import bounds
from fedsift.cli.compare import compare
from fedsift.cli.data import app as data_app
from fedsift.cli.deploy import app as deploy_app
from fedsift.cli.exit_codes import INTERRUPTED, report_problem
from fedsift.cli.frame import app as frame_app
from fedsift.cli.report import report
from fedsift.cli.reproduce import reproduce
from fedsift.cli.rollback import rollback
from fedsift.cli.run import resume, run
from fedsift.cli.user_settings import RunCommand

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
for command in (run, resume, rollback, compare, report, reproduce, bench, bounds, advise):
    app.command(cls=RunCommand if command in (run, compare) else None)(command)
app.add_typer(frame_app, name="frame")
app.add_typer(data_app, name="data")
app.add_typer(deploy_app, name="deploy")


def show_version(is_wanted: bool) -> None:
    """Print the version and exit."""
    if is_wanted:
        print(f"fedsift {fedsift.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Train across clients that send few bytes: communication-efficient federated learning."""


def main(words: list[str] | None = None) -> int:
    """Run a command and return its exit code; see :mod:`fedsift.cli.exit_codes`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(
                errors="replace"
            )  # a terminal that cannot print θ shows a question mark
    try:
        return int(app(words, standalone_mode=False) or 0)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as problem:
        return report_problem(problem)

"""The way into the command line: the commands load torch, which takes seconds.

What can be answered without it is answered here, at once.
"""

from __future__ import annotations

import gc
import sys
from io import TextIOWrapper
from typing import Annotated

import typer

import fedsift

COMMANDS = {
    "run": "Train a federation.",
    "resume": "Continue a stopped run; the result is bit for bit that of an unbroken one.",
    "compare": "Compare algorithms on one task: the bits each needs to reach a target accuracy.",
    "report": "Draw runs together in one HTML file that needs no network.",
    "reproduce": "Make a table or figure of the paper anew, or the comparison of sift.",
    "bench": "Time a round on this machine, part by part, and compare with the physical limit.",
    "bounds": "Print the paper's bounds for given constants, and say which of them mean anything.",
    "advise": "Recommend L, the learning rate and the density of FedAdam-SSM for a task.",
    "frame": "Look into the frames that travel.",
    "data": "Get and check the data sets.",
    "deploy": "Run a federation of real processes.",
}
"""Every command in one line: the first one of its own help."""
INTERRUPTED = 130


def main(words: list[str] | None = None) -> int:
    """Show the version or the list of commands, or load the command that is meant and run it."""
    is_whole_process = words is None
    words = sys.argv[1:] if words is None else words
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no θ gets a question mark
    try:
        if words in ([], ["--help"], ["--version"]):
            return int(listing()(words or ["--help"], standalone_mode=False) or 0)
        from fedsift.cli.commands import main as run_command

        if is_whole_process:
            # What the imports made lives as long as the process. The collector need not go through
            # it again: in forked processes that copies memory, and at the end it takes a while.
            gc.freeze()
        return run_command(words)
    except KeyboardInterrupt:  # while something was loaded
        return INTERRUPTED


def listing() -> typer.Typer:
    """The commands by their names and first lines alone."""
    app = empty_app()
    for name, line in COMMANDS.items():
        app.command(name, help=line)(lambda: None)
    return app


def empty_app() -> typer.Typer:
    """The command ``fedsift``, yet without commands."""
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
    )
    app.callback()(common)
    return app


def show_version(wanted: bool) -> None:
    """Print the version, and end."""
    if wanted:
        print(f"fedsift {fedsift.__version__}")
        raise typer.Exit


def common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Communication-efficient federated learning: FedAdam-SSM and its baselines."""

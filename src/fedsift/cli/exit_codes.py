"""How a command ends: its exit code, and one line on stderr if something went wrong."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import click

from fedsift.errors import ConfigError, Diverged, OutOfMemory, TooFewClients, WorkerDied

DISK_ERROR, BAD_INPUT, TRAINING_FAILED = 1, 2, 3
INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 plus the signal's number, as in a shell."""
SECONDS_FOR_FIRST_RANK = 15
"""Seconds that torchrun's other ranks wait, so that only the first one reports a common problem."""


@contextmanager
def user_input() -> Iterator[None]:
    """Turn a ValueError into a ConfigError: inside the block, invalid values come from the user.

    An error that starts with the name of a setting gets the spelling of the command-line option.

    >>> with user_input():
    ...     raise ValueError("batch_size must be at least 1, got 0")
    Traceback (most recent call last):
    ...
    fedsift.errors.ConfigError: batch-size must be at least 1, got 0
    """
    try:
        yield
    except ValueError as problem:
        text = re.sub(r"^\w+(?= must )", lambda name: name[0].replace("_", "-"), str(problem))
        raise ConfigError(text) from None


def exit_code_of(problem: Exception) -> int | None:
    """Return the exit code for an exception that users can do something about, else None."""
    match problem:
        case click.exceptions.NoArgsIsHelpError():
            return 0
        case click.ClickException() | ConfigError():
            return BAD_INPUT
        case Diverged() | OutOfMemory() | TooFewClients() | WorkerDied():
            return TRAINING_FAILED
        case OSError():
            return DISK_ERROR
    return None


def report_problem(problem: Exception) -> int:
    """Print one line for an exception and return the exit code. Raise it again if it is a bug."""
    code = exit_code_of(problem)
    if code is None:
        raise problem
    message = str(problem)
    if isinstance(problem, click.ClickException):
        message = problem.format_message() + algorithm_hint(problem)
    if code == 0:
        print(message)
    else:
        if not is_first_rank():  # torchrun ends all ranks as soon as one has ended
            time.sleep(SECONDS_FOR_FIRST_RANK)
        print(f"fedsift: {one_line(message)}", file=sys.stderr)
    return code


ALGORITHM_OPTIONS = {"run": "--algorithm sift", "compare": "--algorithms fedadam-ssm,sift"}
"""How each command is told which methods to run."""


def algorithm_hint(problem: click.ClickException) -> str:
    """Return how to name an algorithm, if a command got names without an option."""
    command = getattr(getattr(problem, "ctx", None), "info_name", None)
    if "unexpected extra argument" not in problem.message or command not in ALGORITHM_OPTIONS:
        return ""
    return f". Name algorithms like this: {ALGORITHM_OPTIONS[command]}"


def one_line(message: str) -> str:
    """Join lines, and drop a suggestion that both typer and click have added.

    >>> one_line("No such command 'rnu'. Did you mean 'run'? Did you mean 'run'?")
    "No such command 'rnu'. Did you mean 'run'?"
    """
    return re.sub(r"( Did you mean [^?]*\?)\1+", r"\1", " ".join(message.split()))


def is_first_rank() -> bool:
    """Whether this process reports to the user: always, except for torchrun's other ranks."""
    return "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("RANK", "0") == "0"

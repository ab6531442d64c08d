"""Exceptions that users can do something about; the command line prints each in one line."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches


class ConfigError(ValueError):
    """A setting, file or folder given by the user is wrong; the message says how to fix it."""


class Diverged(RuntimeError):
    """Training produced a value that is not finite."""


class TooFewClients(RuntimeError):
    """A round received fewer valid updates than the federation requires."""


class WorkerDied(RuntimeError):
    """A process of an engine ended unexpectedly."""


def require_choice(kind: str, name: str, choices: Collection[str]) -> None:
    """Raise ConfigError unless a name is one of the choices; suggest the one that was meant.

    >>> require_choice("model", "cn", ["cnn", "vgg11"])
    Traceback (most recent call last):
    ...
    fedsift.errors.ConfigError: unknown model 'cn'; did you mean 'cnn'? Choose one of: cnn, vgg11
    """
    if name in choices:
        return
    close = get_close_matches(name, choices, n=1)
    question = f"did you mean {close[0]!r}? Choose" if close else "choose"
    raise ConfigError(f"unknown {kind} {name!r}; {question} one of: {', '.join(choices)}")

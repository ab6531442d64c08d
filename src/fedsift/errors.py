"""Exceptions that users can do something about; the command line prints each in one line."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from difflib import get_close_matches
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from typing import Any, NoReturn


class ConfigError(ValueError):
    """A setting, file or folder given by the user is wrong; the message says how to fix it."""


class Diverged(RuntimeError):
    """Training produced a value that is not finite."""


class TooFewClients(RuntimeError):
    """A round received fewer valid updates than the federation requires."""


class WorkerDied(RuntimeError):
    """A process of an engine ended unexpectedly."""


class OutOfMemory(RuntimeError):
    """The GPU has too little memory; the message says what needs less."""


def require_choice(kind: str, name: str, choices: Collection[str]) -> None:
    """Raise ConfigError unless a name is one of the choices; suggest the most similar one.

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


def require_packages(purpose: str, *modules: str, extra: str) -> None:
    """Raise ConfigError unless all modules are installed that an optional feature needs.

    >>> require_packages("TensorBoard events", "no_such_module", extra="tensorboard")
    Traceback (most recent call last):
    ...
    fedsift.errors.ConfigError: TensorBoard events need no_such_module: in the \
folder of fedsift's source, run pip install '.[tensorboard]'
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{purpose} need {' and '.join(missing)}: in the folder of fedsift's "
            f"source, run pip install '.[{extra}]'"
        )


RENAMED = {
    "fedsift.Moments": "fedsift.State",
    "fedsift.adam.adam_step": "fedsift.adam.AdamStep",
    "fedsift.algorithms.fedsgd.sgd_step": "fedsift.algorithms.fedsgd.SgdStep",
    "fedsift.codec.blocks": "fedsift.codec.value_blocks",
    "fedsift.data.deal": "fedsift.data.partition_indices",
    "fedsift.data.from_partition": "fedsift.data.from_huggingface",
    "fedsift.mask": "fedsift.selection",
    "fedsift.memories": "fedsift.federation.memories",
    "fedsift.runs.begin": "fedsift.runs.restore_run",
    "fedsift.runs.go": "fedsift.runs.train_rounds",
    "fedsift.runs.summarise": "fedsift.runs.run_summary",
    "fedsift.simulation.Result": "fedsift.Result",
    "fedsift.simulation.simulate": "fedsift.simulate",
    "fedsift.theory.Setting": "fedsift.theory.ConvergenceSetting",
    "fedsift.theory.advise": "fedsift.advise.advise",
    "fedsift.theory.calibration": "fedsift.advise.calibration",
    "fedsift.theory.reality": "fedsift.theory.measured_deviation",
    "fedsift.theory.sharper": "fedsift.theory.sharper_bound",
    "fedsift.theory.updates": "fedsift.theory.client_updates",
    "fedsift.theory.visited_noise": "fedsift.theory.gradient_noise",
    "fedsift.theory.watch": "fedsift.theory.compare_with_centralized",
    "fedsift.vector.Moments": "fedsift.vector.State",
}
"""Earlier names of modules and functions, and their new names."""


def explain_renamed(module: str) -> Callable[[str], Any]:
    """Return a module's ``__getattr__``, whose error gives the new name of a renamed function."""

    def missing(name: str) -> NoReturn:
        old = f"{module}.{name}"
        if old in RENAMED:
            raise ImportError(f"{old} is now {RENAMED[old]}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return missing


class RenamedModules(MetaPathFinder):
    """An import hook whose error gives the new name of a renamed module."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> None:
        """Raise ModuleNotFoundError if the module was renamed."""
        if name in RENAMED:
            raise ModuleNotFoundError(f"{name} is now {RENAMED[name]}")

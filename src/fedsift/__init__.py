"""fedsift: communication-efficient federated learning.

>>> import fedsift
>>> fedsift.algorithms.fedadam_ssm(density=0.01)
fedadam_ssm(density=0.01, local_steps=30, lr=0.001, beta1=0.9, beta2=0.999, eps=1e-06)
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedsift.errors import Diverged, RenamedModules, explain_renamed

if TYPE_CHECKING:
    from fedsift import (
        advise,
        algorithms,
        codec,
        data,
        integrations,
        llm,
        models,
        schedules,
        theory,
    )
    from fedsift.api import Result, rounds, simulate
    from fedsift.optim import Adam
    from fedsift.vector import Layout, State

__version__ = "0.1.0"

__all__ = [
    "Adam",
    "Diverged",
    "Layout",
    "Result",
    "State",
    "advise",
    "algorithms",
    "codec",
    "data",
    "integrations",
    "llm",
    "models",
    "rounds",
    "schedules",
    "simulate",
    "theory",
]

HOMES = {
    "Adam": "optim",
    "Layout": "vector",
    "Result": "api",
    "State": "vector",
    "rounds": "api",
    "simulate": "api",
}
"""Where a name is defined; the other names are modules."""

sys.meta_path.append(RenamedModules())


def __getattr__(name: str) -> Any:
    """Import a name when it is first used, because importing torch takes seconds."""
    if name not in __all__:
        explain_renamed(__name__)(name)
    module = import_module(f"fedsift.{HOMES.get(name, name)}")
    return getattr(module, name) if name in HOMES else module


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""fedsift: communication-efficient federated learning.

>>> import fedsift
>>> fedsift.algorithms.fedadam_ssm(density=0.01)
fedadam_ssm(density=0.01, local_steps=30, lr=0.001, beta1=0.9, beta2=0.999, eps=1e-06)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedsift import algorithms, codec
from fedsift.engine.task import Diverged
from fedsift.optim import Adam
from fedsift.simulation import Result, simulate
from fedsift.vector import Layout, Moments

if TYPE_CHECKING:
    from fedsift import theory

__version__ = "0.1.0"

__all__ = [
    "Adam",
    "Diverged",
    "Layout",
    "Moments",
    "Result",
    "algorithms",
    "codec",
    "simulate",
    "theory",
]


def __getattr__(name: str) -> Any:
    if name == "theory":  # it imports much that a deployed client never uses
        return import_module("fedsift.theory")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Settings of methods: help, range and check, declared in the method's signature.

A method annotates each setting with one of the types below, or with its own
``Annotated[float, Setting(...)]``. The checks, the command line's options, the documentation and
reports are all generated from these declarations.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter
from typing import Annotated, Any, NamedTuple, get_args


class Range(NamedTuple):
    """The values that a setting may take: in words, and as a test."""

    text: str
    contains: Callable[[float], bool]


FINITE = Range("a finite number", math.isfinite)
POSITIVE = Range("a positive number", lambda x: 0 < x < math.inf)
NONNEGATIVE = Range("a number of at least 0", lambda x: 0 <= x < math.inf)
SHARE = Range("in (0, 1]", lambda x: 0 < x <= 1)
FRACTION = Range("in [0, 1]", lambda x: 0 <= x <= 1)
BELOW_ONE = Range("in [0, 1)", lambda x: 0 <= x < 1)
COUNT = Range("a whole number of at least 1", lambda x: isinstance(x, int) and x >= 1)
BITS = Range("a whole number from 2 to 8", lambda x: isinstance(x, int) and 2 <= x <= 8)


@dataclass(frozen=True)
class Setting:
    """The declaration of a setting: a help text without a final period, and a range.

    >>> Momentum = Annotated[float, Setting("Momentum of the server", BELOW_ONE)]
    """

    help: str
    range: Range = FINITE


Density = Annotated[float, Setting("α = k/d, the share of coordinates a client sends", SHARE)]
LocalSteps = Annotated[int, Setting("L, the local mini-batch steps per round", COUNT)]
LearningRate = Annotated[float, Setting("Learning rate of the local steps", POSITIVE)]
Beta1 = Annotated[float, Setting("β₁, the decay of the first moment", BELOW_ONE)]
Beta2 = Annotated[float, Setting("β₂, the decay of the second moment", BELOW_ONE)]
Epsilon = Annotated[float, Setting("ε, inside Adam's square root", POSITIVE)]
ResidualDecay = Annotated[
    float, Setting("Share of the unsent residual kept for the next round", FRACTION)
]


@dataclass(frozen=True)
class DeclaredSetting:
    """A setting of one method: its name, type and default, and what its annotation declares."""

    name: str
    kind: type[float]
    default: float
    declaration: Setting

    @classmethod
    def of(cls, parameter: Parameter, annotation: Any) -> DeclaredSetting:
        """Read a parameter; a setting that is not annotated has the type of its default."""
        kind, *metadata = get_args(annotation) or [annotation]
        declared = (x for x in metadata if isinstance(x, Setting))
        kind = kind if kind in (int, float) else type(parameter.default)
        return cls(parameter.name, kind, parameter.default, next(declared, Setting("")))

    def checked(self, value: float) -> float:
        """Return the value in the setting's type, or raise ValueError if it is out of range.

        >>> DeclaredSetting("density", float, 0.05, Setting("", SHARE)).checked(2.0)
        Traceback (most recent call last):
        ...
        ValueError: density must be in (0, 1], got 2.0
        """
        allowed = self.declaration.range
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or abs(value) > sys.float_info.max or not allowed.contains(value):
            raise ValueError(f"{self.name} must be {allowed.text}, got {value!r}")
        return float(value) if self.kind is float else value  # 1 and 1.0 become equal settings

    def describe(self) -> dict[str, Any]:
        """Everything about the setting as plain data.

        >>> DeclaredSetting("lr", float, 0.001, Setting("Learning rate", POSITIVE)).describe()
        {'name': 'lr', 'type': 'float', 'default': 0.001, 'range': 'a positive number', \
'help': 'Learning rate'}
        """
        return {
            "name": self.name,
            "type": self.kind.__name__,
            "default": self.default,
            "range": self.declaration.range.text,
            "help": self.declaration.help,
        }

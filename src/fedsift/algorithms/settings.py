"""Settings of methods: help, range and check, declared in the method's signature.

A method annotates each setting with one of the types below, or with its own
``Annotated[float, Setting(...)]``. A setting is a number, a bool, or one of a few names, as in
``Literal["adam", "yogi"]``; ``int | None`` declares one that may be left out. Every number may also
be a schedule (``fedsift.schedules``). The checks, the command line's options, the documentation and
reports are all generated from these declarations.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from inspect import Parameter
from types import NoneType
from typing import Annotated, Any, NamedTuple, get_args

from fedsift.errors import ConfigError
from fedsift.schedules import Schedule, describe, parse_schedule
from fedsift.task.user_code import import_function

Value = float | int | bool | str | None
"""The value of a setting in one round."""
GivenSetting = Value | Callable[[int], float]
"""A setting as it is given: a value, or a schedule."""
NONE = "none"
"""The text for a setting that is left out, in configuration files and on the command line."""


class Range(NamedTuple):
    """The values that a setting may take: in words, and as a test."""

    text: str
    contains: Callable[[Any], bool]


def one_of(names: tuple[str, ...]) -> Range:
    """Return the range of a setting that is one of these names."""
    return Range(f"one of: {', '.join(names)}", names.__contains__)


FINITE = Range("a finite number", math.isfinite)
POSITIVE = Range("a positive number", lambda x: 0 < x < math.inf)
NONNEGATIVE = Range("a number of at least 0", lambda x: 0 <= x < math.inf)
SHARE = Range("in (0, 1]", lambda x: 0 < x <= 1)
FRACTION = Range("in [0, 1]", lambda x: 0 <= x <= 1)
BELOW_ONE = Range("in [0, 1)", lambda x: 0 <= x < 1)
COUNT = Range("a whole number of at least 1", lambda x: isinstance(x, int) and x >= 1)
BITS = Range("a whole number from 2 to 8", lambda x: isinstance(x, int) and 2 <= x <= 8)
TEXT = Range("text", lambda x: True)


@dataclass(frozen=True)
class Setting:
    """The declaration of a setting: a help text without a final period, and a range.

    Without a range, numbers may be any finite number. A ``fixed`` number cannot be a schedule:
    declare it for settings that ``Algorithm.model`` uses, or that are themselves numbers of rounds.

    >>> Momentum = Annotated[float, Setting("Momentum of the server", BELOW_ONE)]
    """

    help: str
    range: Range | None = None
    fixed: bool = False


Density = Annotated[float, Setting("α = k/d, the share of coordinates a client sends", SHARE)]
LocalSteps = Annotated[int, Setting("L, the local mini-batch steps per round", COUNT)]
LearningRate = Annotated[float, Setting("Learning rate of the local steps", POSITIVE)]
ServerLearningRate = Annotated[float, Setting("Learning rate of the server", POSITIVE)]
Beta1 = Annotated[float, Setting("β₁, the decay of the first moment", BELOW_ONE)]
Beta2 = Annotated[float, Setting("β₂, the decay of the second moment", BELOW_ONE)]
Epsilon = Annotated[float, Setting("ε, inside Adam's square root", POSITIVE)]
ResidualDecay = Annotated[
    float, Setting("Share of the unsent residual kept for the next round", FRACTION)
]


KINDS = {float: FINITE, int: FINITE, bool: Range("true or false", lambda x: True), str: TEXT}
"""The types of settings, and their ranges unless they declare one."""


@dataclass(frozen=True)
class DeclaredSetting:
    """A setting of one method: its name, type and default, and what its annotation declares."""

    name: str
    kind: type[Any]
    default: Any
    declaration: Setting
    is_optional: bool = False

    @classmethod
    def of(cls, parameter: Parameter, annotation: Any) -> DeclaredSetting:
        """Read a parameter; a setting that is not annotated has the type of its default."""
        parts = list(parts_of(annotation))
        default = parameter.default
        kind = next((kind for kind in KINDS if kind in parts), type(default))
        declaration = next((x for x in parts if isinstance(x, Setting)), Setting(""))
        if names := tuple(x for x in parts if isinstance(x, str)):
            declaration = replace(declaration, range=one_of(names))
        return cls(parameter.name, kind, default, declaration, NoneType in parts)

    @property
    def is_required(self) -> bool:
        """Whether the setting has no default."""
        return self.default is Parameter.empty

    @property
    def range(self) -> Range:
        """The values that the setting may take in each round."""
        return self.declaration.range or KINDS.get(self.kind, FINITE)

    @property
    def may_vary(self) -> bool:
        """Whether the setting may be a schedule."""
        return self.kind in (int, float) and not self.declaration.fixed

    def checked(self, given: GivenSetting) -> GivenSetting:
        """Return what was given, in the setting's type; raise ValueError if it is out of range.

        Of a schedule, the first round is checked.

        >>> DeclaredSetting("density", float, 0.05, Setting("", SHARE)).checked(2.0)
        Traceback (most recent call last):
        ...
        ValueError: density must be in (0, 1], got 2.0
        """
        if not callable(given):
            return self.value(given)
        if not self.may_vary:
            raise ValueError(
                f"{self.name} must be {self.range.text} in all rounds, got the schedule "
                f"{describe(given)}"
            )
        self.at(given, 1)
        return given

    def value(self, given: Value) -> Value:
        """Return a value in the setting's type; raise ValueError if it is out of range."""
        if given is None and self.is_optional:
            return None
        if not self.has_kind(given) or not self.range.contains(given):
            raise ValueError(f"{self.name} must be {self.range.text}, got {given!r}")
        return float(given) if self.kind is float else given  # type: ignore[arg-type]

    def has_kind(self, given: Value) -> bool:
        """Whether a value has the setting's type. Whole numbers are also floats."""
        if self.kind in (bool, str):
            return isinstance(given, self.kind)
        if not isinstance(given, int | float) or isinstance(given, bool):
            return False
        return abs(given) <= sys.float_info.max

    def at(self, given: GivenSetting, round: int) -> Value:
        """Return the value in a round. Whole numbers are rounded from those of the schedule.

        >>> steps = DeclaredSetting("local_steps", int, 30, Setting("", COUNT))
        >>> steps.at(lambda round: 30 / round, 4)
        8
        >>> steps.at(lambda round: 30 - round, 30)
        Traceback (most recent call last):
        ...
        fedsift.errors.ConfigError: local_steps must be a whole number of at least 1, got 0 \
in round 30 of ...
        """
        if not callable(given):
            return given
        try:
            found: Any = given(round)
            number = found.item() if hasattr(found, "item") else found
            whole = self.kind is int and isinstance(number, float) and math.isfinite(number)
            return self.value(math.floor(number + 0.5) if whole else number)
        except ValueError as problem:
            raise ConfigError(f"{problem} in round {round} of {describe(given)}") from None
        except Exception as problem:  # the user's function may raise anything
            raise ConfigError(
                f"{describe(given)}, the schedule of {self.name}, fails in round {round}: {problem}"
            ) from None

    def read(self, given: GivenSetting) -> GivenSetting:
        """Return a setting from its form in a file, where a schedule is text.

        >>> DeclaredSetting("lr", float, 0.1, Setting("")).read("cosine(0.1)")
        cosine(start=0.1, end=0.0, rounds=None)
        """
        if not isinstance(given, str) or self.kind is str:
            return given
        if self.is_optional and given == NONE:
            return None
        if not self.may_vary:
            return given  # the check refuses it
        if "(" in given:
            return self.read_schedule(given)
        return import_function(f"schedule of {self.name}", given) if ":" in given else given

    def read_schedule(self, text: str) -> Schedule:
        """Return the schedule in a text; name the setting in the error if there is none."""
        try:
            return parse_schedule(text)
        except ValueError as problem:
            raise ConfigError(f"{self.name.replace('_', '-')} = {problem}") from None

    def describe(self) -> dict[str, Any]:
        """Everything about the setting as plain data.

        >>> DeclaredSetting("lr", float, 0.001, Setting("Learning rate", POSITIVE)).describe()
        {'name': 'lr', 'type': 'float', 'default': 0.001, 'range': 'a positive number', \
'help': 'Learning rate'}
        """
        return {
            "name": self.name,
            "type": self.kind.__name__,
            "default": None if self.is_required else self.default,
            "range": self.range.text,
            "help": self.declaration.help,
        }


def parts_of(annotation: Any) -> Iterator[Any]:
    """Yield the types, names and declarations in an annotation.

    >>> list(parts_of(Annotated[int | None, "help"]))
    [<class 'int'>, <class 'NoneType'>, 'help']
    """
    if not (inner := get_args(annotation)):
        yield annotation
    for part in inner:
        yield from parts_of(part)


def written(given: GivenSetting) -> float | int | bool | str:
    """Return a setting as it is written to a file; :meth:`DeclaredSetting.read` is the inverse.

    >>> written(0.1), written(None), written(parse_schedule("constant(1)"))
    (0.1, 'none', 'constant(value=1.0)')
    >>> written(lambda round: 1 / round)
    Traceback (most recent call last):
    ...
    fedsift.errors.ConfigError: the schedule ...:<lambda> cannot be restored from a file: ...
    """
    if not callable(given):
        return NONE if given is None else given
    text = describe(given)
    if not isinstance(given, Schedule) and not is_importable(text):
        raise ConfigError(
            f"the schedule {text} cannot be restored from a file: use one of fedsift.schedules, or "
            "a function with a name, at the top level of a module"
        )
    return text


def is_importable(text: str) -> bool:
    """Whether ``module:function`` names a function that another program can import."""
    module, _, name = text.partition(":")
    found = getattr(sys.modules.get(module), name, None)
    return module != "__main__" and callable(found) and not isinstance(found, type)

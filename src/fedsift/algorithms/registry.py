"""The registry of all methods by command-line name, with their settings and appearance."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from inspect import Parameter, Signature, signature, unwrap
from typing import Any, Concatenate, ParamSpec, get_type_hints

from fedsift.algorithms.method import Algorithm, Phase
from fedsift.algorithms.settings import DeclaredSetting, GivenSetting, Value
from fedsift.errors import ConfigError, require_choice
from fedsift.schedules import Schedule
from fedsift.task.user_code import import_function, is_user_code

P = ParamSpec("P")
Wrap = Callable[Concatenate[Algorithm, P], Algorithm]
"""A function that takes an algorithm and settings, and returns a changed algorithm."""


@dataclass(frozen=True)
class Method:
    """A registered method: the function that makes its algorithm, and how figures show it.

    ``dashed`` lines distinguish methods of the same ``color``. A method without a color gets the
    next free one in a report.
    """

    name: str
    make: Callable[..., Algorithm]
    label: str
    color: str | None = None
    dashed: bool = False

    @functools.cached_property
    def settings(self) -> dict[str, DeclaredSetting]:
        """The settings by name, as the signature declares them."""
        return declared_settings(self.make)

    def __call__(self, *args: Any, **kwargs: Any) -> Algorithm:
        """Make the algorithm, with its settings checked."""
        try:
            bound = signature(self.make).bind(*args, **kwargs)
        except TypeError as problem:
            names = ", ".join(self.settings)
            raise TypeError(f"{self.name}: {problem}; its settings are {names}") from None
        bound.apply_defaults()
        given = {key: self.settings[key].checked(x) for key, x in bound.arguments.items()}
        made = self.in_round(given, 1)
        if any(map(callable, given.values())):
            made = replace(made, phase=self.varying_phase(given, made))
        return replace(made, name=self.name, settings=given)

    def in_round(self, given: Mapping[str, GivenSetting], round: int) -> Algorithm:
        """Make the algorithm with the values that the settings have in a round."""
        made = self.make(**{key: self.settings[key].at(x, round) for key, x in given.items()})
        if not isinstance(made, Algorithm):
            raise TypeError(f"the method {self.name!r} must return an Algorithm, not {made!r}")
        if not isinstance(phase := made.phase(1), Phase):
            raise TypeError(f"phase must return a Phase for every round, got {phase!r} in round 1")
        return made

    def varying_phase(
        self, given: Mapping[str, GivenSetting], first: Algorithm
    ) -> Callable[[int], Phase]:
        """Return the phase of each round for settings of which some are schedules.

        Rounds with the same values share their algorithm.
        """

        @functools.lru_cache(maxsize=8)
        def algorithm(values: tuple[tuple[str, Value], ...]) -> Algorithm:
            made = self.in_round(dict(values), 1)
            require_same_form(first, made, {k: x for k, x in values if callable(given[k])})
            return made

        def phase(round: int) -> Phase:
            values = {key: self.settings[key].at(x, round) for key, x in given.items()}
            return algorithm(tuple(values.items())).phase(round)

        return phase

    def describe(self) -> dict[str, Any]:
        """Everything about the method as plain data that JSON can hold."""
        return {
            "name": self.name,
            "function": self.make.__name__,
            "label": self.label,
            "summary": (inspect.getdoc(self.make) or "").split("\n")[0],
            "citation": docstring_paragraph(sys.modules[self.make.__module__].__doc__, 1),
            "color": self.color,
            "dashed": self.dashed,
            "settings": [setting.describe() for setting in self.settings.values()],
        }


def declared_settings(function: Callable[..., Algorithm]) -> dict[str, DeclaredSetting]:
    """Return the settings in the signature of a function, by name."""
    hints = get_type_hints(function, include_extras=True)
    parameters = signature(function).parameters
    return {key: DeclaredSetting.of(p, hints.get(key)) for key, p in parameters.items()}


METHODS: dict[str, Method] = {}
"""Every method by its command-line name."""
WRAPPERS: dict[str, Callable[..., Algorithm]] = {}
"""Functions that change any method's algorithm, by the prefix of the changed method's name."""


def method(
    name: str, *, label: str | None = None, color: str | None = None, dashed: bool = False
) -> Callable[[Callable[P, Algorithm]], Callable[P, Algorithm]]:
    """Register a function that makes an algorithm, and check the settings it is called with.

    Parameters
    ----------
    name
        The name on the command line.
    label
        The name in figures; ``name`` by default.
    color
        The color in figures, ``"#rrggbb"``. Without one, a report picks a free color.
    dashed
        Whether its lines are dashed, to tell it from another method of the same color.

    """

    def register(make: Callable[P, Algorithm]) -> Callable[P, Algorithm]:
        if name in METHODS and METHODS[name].make.__module__.startswith(__package__):
            raise ValueError(f"{name!r} is a built-in method: give yours another name")
        made = METHODS[name] = Method(name, make, label or name, color, dashed)

        @functools.wraps(make)
        def checked(*args: P.args, **kwargs: P.kwargs) -> Algorithm:
            return made(*args, **kwargs)

        return checked

    return register


def wrapper(prefix: str) -> Callable[[Wrap[P]], Wrap[P]]:
    """Register a function that takes an algorithm and settings, and returns a changed algorithm.

    For every method, it makes another one, named ``prefix-method``, with the settings of both.
    """

    def register(wrap: Wrap[P]) -> Wrap[P]:
        WRAPPERS[prefix] = wrap

        @functools.wraps(wrap)
        def checked(algorithm: Algorithm, /, *args: P.args, **kwargs: P.kwargs) -> Algorithm:
            if not algorithm.name:
                raise ValueError(f"{prefix} takes an algorithm made by a function with @method")
            _, *own = signature(wrap).bind(algorithm, *args, **kwargs).arguments.items()
            return find(f"{prefix}-{algorithm.name}")(**algorithm.settings, **dict(own))

        return checked

    return register


def wrapped(prefix: str, inner: Method) -> Method:
    """Return the method whose algorithms are those of another method, changed by a wrapper."""
    wrap = WRAPPERS[prefix]
    _, *own = signature(wrap).parameters.values()
    if both := [key for key in settings_of_wrapper(prefix) if key in inner.settings]:
        raise ConfigError(f"{inner.name} cannot be {prefix}: it already has {', '.join(both)}")

    def make(**given: Any) -> Algorithm:
        outer = {key: given.pop(key) for key in settings_of_wrapper(prefix)}
        return wrap(replace(inner.make(**given), name=inner.name), **outer)

    shared = [*signature(inner.make).parameters.values(), *own]
    by_name = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in shared]
    make.__signature__ = Signature(by_name)  # type: ignore[attr-defined]
    make.__annotations__ = {
        **get_type_hints(inner.make, include_extras=True),
        **get_type_hints(wrap, include_extras=True),
    }
    return Method(f"{prefix}-{inner.name}", make, f"{inner.label}, {prefix}")


def settings_of_wrapper(prefix: str) -> dict[str, DeclaredSetting]:
    """Return the settings that a wrapper adds to those of a method."""
    _, *own = declared_settings(WRAPPERS[prefix]).items()
    return dict(own)


def find(name: str) -> Method:
    """Return the method of that name.

    Besides the names of ``METHODS``, there are ``compressed-NAME``, a method whose messages are
    compressed, and ``package.module:function``, which is imported.

    >>> find("compressed-fedsgd").label
    'FedSGD, compressed'
    >>> find("adam")
    Traceback (most recent call last):
    ...
    fedsift.errors.ConfigError: unknown algorithm 'adam'; did you mean ...
    """
    prefix, _, rest = name.partition("-")
    if name not in METHODS and prefix in WRAPPERS:
        return wrapped(prefix, find(rest))
    if is_user_code(name):
        return user_method(name)
    require_choice("algorithm", name, [*sorted(METHODS), "package.module:function"])
    return METHODS[name]


def registered(name: str) -> Method | None:
    """Return the method of that name if it is known without importing the user's code.

    >>> registered("my_module:my_method") is None, registered("fedsgd").label
    (True, 'FedSGD')
    """
    made = {f"{known.make.__module__}:{known.make.__name__}": known for known in METHODS.values()}
    return METHODS.get(name) or made.get(name)


def normalized_name(name: str) -> str:
    """Return a method's name with hyphens, unless it names a function of the user's own module.

    >>> normalized_name("fedadam_ssm"), normalized_name("my_module:my_method")
    ('fedadam-ssm', 'my_module:my_method')
    >>> normalized_name("compressed_my_module:my_method")
    'compressed-my_module:my_method'
    """
    for prefix in WRAPPERS:
        if name.startswith((f"{prefix}-", f"{prefix}_")):
            return f"{prefix}-{normalized_name(name[len(prefix) + 1 :])}"
    return name if name in METHODS or is_user_code(name) else name.replace("_", "-")


def user_method(name: str) -> Method:
    """Import a method; a function without ``@method`` is named as it is imported."""
    make = unwrap(import_function("algorithm", name))
    known = (method for method in METHODS.values() if method.make is make)
    return next(known, None) or Method(name, make, name)


def for_rounds(algorithm: Algorithm, rounds: int) -> Algorithm:
    """Return an algorithm for a run with this many rounds, which its schedules may depend on.

    Schedules are checked for the last round.

    >>> import fedsift.algorithms
    >>> from fedsift.schedules import cosine
    >>> for_rounds(fedsift.algorithms.fedsgd(lr=cosine(0.1, 0.01)), rounds=50)
    fedsgd(local_steps=30, lr=cosine(start=0.1, end=0.01, rounds=50))
    """
    schedules = {key: x for key, x in algorithm.settings.items() if callable(x)}
    if not schedules:
        return algorithm
    method = find(algorithm.name)
    bound = {k: x.over(rounds) if isinstance(x, Schedule) else x for k, x in schedules.items()}
    made = method(**{**algorithm.settings, **bound})
    for key, schedule in bound.items():
        method.settings[key].at(schedule, rounds)
    return replace(algorithm, phase=made.phase, settings=made.settings)


def require_own_rounds(algorithm: Algorithm) -> None:
    """Refuse schedules that depend on the number of rounds but are not told it."""
    for key, schedule in algorithm.settings.items():
        if isinstance(schedule, Schedule) and schedule.over(1) != schedule:
            raise ConfigError(
                f"{key} = {schedule!r} needs its number of rounds, so that the server and the "
                "clients use the same: pass rounds="
            )


def require_same_form(first: Algorithm, made: Algorithm, varying: Mapping[str, Value]) -> None:
    """Refuse schedules that change the state, the memories or the weights between rounds."""
    parts = ("state", "client_memory", "server_memory", "lengths", "weights", "server_start")
    if any(getattr(first, part) != getattr(made, part) for part in parts):
        given = ", ".join(f"{key}={value}" for key, value in varying.items())
        raise ConfigError(
            f"with {given}, the method would have another state, memory or weights than in round "
            "1: the setting that decides this cannot be a schedule"
        )


def settings_of(name: str) -> dict[str, Value]:
    """Return a method's settings and their defaults, by name.

    >>> import fedsift.algorithms
    >>> settings_of("fedsgd")
    {'local_steps': 30, 'lr': 0.001}
    """
    return {key: setting.default for key, setting in find(name).settings.items()}


def describe() -> list[dict[str, Any]]:
    """Return everything about every method, sorted by name, as plain data that JSON can hold.

    >>> import fedsift.algorithms
    >>> [x["label"] for x in describe() if x["color"] == "#0072b2"]
    ['FedAdam-SSM']
    """
    return [METHODS[name].describe() for name in sorted(METHODS)]


def docstring_paragraph(text: str | None, number: int) -> str:
    r"""Return one paragraph of a docstring on one line, or "" if there is none.

    >>> docstring_paragraph("Title.\n\nFirst\nlines.", 1)
    'First lines.'
    """
    paragraphs = inspect.cleandoc(text or "").split("\n\n")
    return " ".join(paragraphs[number].split()) if number < len(paragraphs) else ""

"""User-defined data, given as ``package.module:function``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

from fedsift.task.samples import seeded_random, type_names
from fedsift.task.user_code import import_function

DEFAULT_CLIENTS = 20
"""Passed to a function that needs a number of clients if none is given."""


@dataclass(frozen=True)
class UserData:
    """The data of each client, in any format that ``simulate`` takes, and the test set or None.

    ``client_tests`` are the test data of each client, or None.
    """

    clients: Sequence[Any]
    test: Any
    client_tests: Sequence[Any] | None = None


def load_user_data(name: str, seed: int, num_clients: int = 0) -> UserData:
    """Call the function with this name, and check what it returns.

    The function returns ``(clients, test)`` or ``(clients, test, client_tests)``. If it has the
    arguments ``seed`` or ``num_clients``, they are passed; ``num_clients`` only if it is given, or
    if the function has no default for it.
    The global random generators are seeded, so that the data is the same when a run is resumed.
    """
    function = import_function("data", name)
    try:
        with seeded_random(seed):
            found = function(**arguments_of(function, seed, num_clients))
    except Exception as problem:  # the user's function may raise anything
        reason = next(iter(str(problem).strip().splitlines()), "")
        raise ValueError(f"data {name!r} fails: {type(problem).__name__}: {reason}") from None
    return checked(name, found, num_clients)


def arguments_of(function: Callable[..., Any], seed: int, num_clients: int) -> dict[str, int]:
    """Return the arguments to call a function with.

    >>> arguments_of(lambda num_clients=5: None, seed=1, num_clients=0)
    {}
    >>> arguments_of(lambda seed, num_clients: None, seed=1, num_clients=0)
    {'seed': 1, 'num_clients': 20}
    """
    accepted = signature(function).parameters
    passed = {"seed": seed} if "seed" in accepted else {}
    if "num_clients" in accepted:
        has_default = accepted["num_clients"].default is not Parameter.empty
        if num_clients or not has_default:
            passed["num_clients"] = num_clients or DEFAULT_CLIENTS
    return passed


def checked(name: str, found: Any, num_clients: int) -> UserData:
    """Return what the function returned; refuse anything but clients and a test set."""
    if not isinstance(found, tuple | list) or len(found) not in (2, 3):
        raise ValueError(
            f"data {name!r} must return (clients, test): a list with a pair (x, y) per client, and "
            f"a pair (x, y) or None; got {type_names(found)}"
        )
    clients, test, *client_tests = found
    if not isinstance(clients, Sequence) or not len(clients):
        raise ValueError(
            f"data {name!r} must return a list with the data of at least one client, got "
            f"{type_names(clients) if not isinstance(clients, Sequence) else 'an empty list'}"
        )
    if num_clients and len(clients) != num_clients:
        raise ValueError(
            f"data {name!r} returns {len(clients)} clients, not {num_clients}: leave --clients "
            "out, or give the function an argument num_clients"
        )
    return UserData(clients, test, *client_tests)

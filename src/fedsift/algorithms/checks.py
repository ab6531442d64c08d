"""Checks of what a method declares and of what its functions return, with errors that say how."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedsift.codec.update import PAYLOADS, ROLES, Part, Parts
from fedsift.task import NumSteps
from fedsift.vector import State

if TYPE_CHECKING:
    from fedsift.algorithms.method import Memory


def check_function(name: str, function: object, parameters: str) -> None:
    """Raise TypeError unless a function of a phase takes the given parameters.

    >>> check_function("step", lambda x, gradient: x, "x, gradient, context")
    Traceback (most recent call last):
    ...
    TypeError: a method's step must take (x, gradient, context), but it takes (x, gradient)
    """
    if not callable(function):
        raise TypeError(f"a method's {name} must be a function of ({parameters}), got {function!r}")
    signature = inspect.signature(function)
    try:
        signature.bind(*parameters.split(", "))
    except TypeError:
        raise TypeError(
            f"a method's {name} must take ({parameters}), but it takes {signature}"
        ) from None


def check_steps(steps: NumSteps) -> None:
    """Raise ValueError unless there is at least one local step."""
    if not callable(steps) and (not isinstance(steps, int) or steps < 1):
        raise ValueError(
            "local_steps must be a whole number of at least 1, or a function such as Epochs(5), "
            f"got {steps!r}"
        )


def check_state(state: Collection[str]) -> None:
    """Raise ValueError unless the state has w, and its vectors are in their order."""
    known = [role for role in ROLES if role in state]
    if list(state) != known or "w" not in known:
        others = ", ".join(role for role in ROLES if role not in PAYLOADS | {"w"})
        raise ValueError(f"a method's state must be w and some of {others}, in this order: {state}")


def check_memory_names(field: str, names: object) -> None:
    """Raise TypeError unless a memory is declared by a tuple of names.

    >>> check_memory_names("client_memory", "residual")
    Traceback (most recent call last):
    ...
    TypeError: client_memory must be a tuple of names, such as ("residual",), got 'residual'
    """
    if not isinstance(names, tuple):
        raise TypeError(f'{field} must be a tuple of names, such as ("residual",), got {names!r}')


def check_declared(field: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raise ValueError if a field names vectors that the method does not have.

    >>> check_declared("server_start", ["v"], ("m",))
    Traceback (most recent call last):
    ...
    ValueError: server_start names 'v', but the method declares m
    """
    for name in names:
        if name not in known:
            declared = ", ".join(sorted(known)) or "nothing"
            raise ValueError(f"{field} names {name!r}, but the method declares {declared}")


def names_with_lengths(*declared: tuple[str, ...]) -> set[str]:
    """Return the vectors of which a method may declare the length."""
    return {name for names in declared for name in names} | PAYLOADS


def checked_message(returned: Any, memory: Memory, function: str) -> tuple[Parts, Memory]:
    """Return what ``send`` or ``broadcast`` returned, after checking its form.

    >>> from torch import zeros
    >>> checked_message(((), {}), {"residual": zeros(1, 2)}, "send")
    Traceback (most recent call last):
    ...
    ValueError: send returned memory named nothing; the method declares residual
    """
    if not (
        isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)
    ):
        raise TypeError(f"{function} must return the parts of a message and a memory (or {{}})")
    parts, new_memory = returned
    if not (isinstance(parts, tuple) and all(isinstance(part, Part) for part in parts)):
        raise TypeError(f"{function} must return parts of a message made by sparse() or dense()")
    if set(new_memory) != set(memory):
        got, declared = (", ".join(sorted(x)) or "nothing" for x in (new_memory, memory))
        raise ValueError(f"{function} returned memory named {got}; the method declares {declared}")
    for name, x in new_memory.items():
        if x.shape != memory[name].shape:
            raise ValueError(
                f"{function} returned the memory {name} with the shape {tuple(x.shape)}; it must "
                f"keep its shape {tuple(memory[name].shape)}"
            )
    return parts, new_memory


def checked_state(returned: Any, before: State, function: str) -> State:
    """Return what ``step`` or ``apply`` returned, after checking that it is a state.

    >>> from torch import zeros
    >>> checked_state(zeros(2), State(w=zeros(2)), "apply")
    Traceback (most recent call last):
    ...
    TypeError: apply must return a state with the vectors w, such as x.replace(w=...), got a Tensor
    """
    if isinstance(returned, State) and returned.names == before.names:
        check_shapes(returned, before, function)
        return returned
    got = repr(returned) if isinstance(returned, State) else f"a {type(returned).__name__}"
    raise TypeError(
        f"{function} must return a state with the vectors {', '.join(before.names)}, such as "
        f"x.replace(w=...), got {got}"
    )


def checked_start(returned: Any, state: State) -> State:
    """Return what ``local_start`` returned, after checking that it has the vectors of the state.

    >>> from torch import zeros
    >>> checked_start(zeros(1, 2), State(w=zeros(1, 2)))
    Traceback (most recent call last):
    ...
    TypeError: local_start must return a state with at least the vectors w, got a Tensor
    """
    if not (isinstance(returned, State) and set(state.names) <= set(returned.names)):
        got = repr(returned) if isinstance(returned, State) else f"a {type(returned).__name__}"
        names = ", ".join(state.names)
        raise TypeError(
            f"local_start must return a state with at least the vectors {names}, got {got}"
        )
    check_shapes(returned, state, "local_start")
    return returned


def check_shapes(after: State, before: State, function: str) -> None:
    """Raise ValueError if a function changed the shape of a vector.

    >>> from torch import zeros
    >>> check_shapes(State(w=zeros(2)), State(w=zeros(1, 2)), "step")
    Traceback (most recent call last):
    ...
    ValueError: step returned w with the shape (2,); it must keep its shape (1, 2)
    """
    for name in before.names:
        if after[name].shape != before[name].shape:
            got, kept = tuple(after[name].shape), tuple(before[name].shape)
            raise ValueError(
                f"{function} returned {name} with the shape {got}; it must keep its shape {kept}"
            )


class DeclaredMemory(dict[str, Tensor]):
    """A memory as a method's functions see it: other names than the declared ones are explained.

    >>> DeclaredMemory()["residual"]
    Traceback (most recent call last):
    ...
    ValueError: there is no memory 'residual': declare it, as in client_memory=("residual",), or \
in server_memory if the server keeps it
    """

    def __missing__(self, name: str) -> Tensor:
        raise ValueError(
            f'there is no memory {name!r}: declare it, as in client_memory=("{name}",), or in '
            "server_memory if the server keeps it"
        )


def checked_points(points: Iterable[Tensor], w: Tensor) -> Iterator[Tensor]:
    """Yield the points of a method without gradients, after checking their shape.

    >>> from torch import zeros
    >>> list(checked_points(zeros(1, 3), zeros(1, 3)))
    Traceback (most recent call last):
    ...
    ValueError: points must yield weights of the shape (1, 3), got (3,)
    """
    number = 0
    for number, point in enumerate(points, 1):  # noqa: B007
        if point.shape != w.shape:
            got = tuple(point.shape)
            raise ValueError(f"points must yield weights of the shape {tuple(w.shape)}, got {got}")
        yield point
    if not number:
        raise ValueError("points must yield at least one tensor of weights")

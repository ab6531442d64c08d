"""Schedules in text, as on the command line and in configuration files."""

from __future__ import annotations

import ast
from typing import Any

from fedsift.schedules.schedule import SCHEDULES, Schedule

MAX_LENGTH = 1000
"""A longer text is refused before it is parsed."""
EXAMPLE = "cosine(0.1, 0.001)"


def parse_schedule(text: str) -> Schedule:
    """Return the schedule that a text describes: calls of the schedules by name, with numbers.

    >>> parse_schedule("join(linear_warmup(0.1, rounds=5), cosine(0.1, 1e-3), at=5)")(5)
    0.1
    >>> parse_schedule("exp(0.1)")
    Traceback (most recent call last):
    ...
    ValueError: 'exp(0.1)': unknown schedule 'exp'; choose one of: constant, cosine, ...
    """
    try:
        found = _value(_expression(text))
    except ValueError as problem:
        raise ValueError(f"{text[:80]!r}: {problem}") from None
    except RecursionError:
        raise ValueError(f"{text[:80]!r}... is nested too deeply") from None
    if not isinstance(found, Schedule):
        raise ValueError(f"{text!r} is not a schedule, such as {EXAMPLE}")
    return found


def _expression(text: str) -> ast.expr:
    """Return the expression in a text."""
    if len(text) > MAX_LENGTH:
        raise ValueError(f"a schedule has at most {MAX_LENGTH} characters")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, MemoryError):
        raise ValueError(f"not a schedule, such as {EXAMPLE}") from None


def _value(node: ast.expr) -> Any:
    """Return the value of an expression of numbers, tuples and schedules."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            return _call(name, args, keywords)
        case ast.Constant(value=int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return tuple(_value(part) for part in parts)
    raise ValueError(f"{ast.unparse(node)} is neither a number nor a schedule such as {EXAMPLE}")


def _call(name: str, args: list[ast.expr], keywords: list[ast.keyword]) -> Schedule:
    """Return the schedule that a call makes."""
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}; choose one of: {', '.join(SCHEDULES)}")
    named = {str(each.arg): _value(each.value) for each in keywords}
    try:
        return SCHEDULES[name](*map(_value, args), **named)
    except TypeError as problem:
        reason = str(problem).replace(f"{name}.__init__() ", "")
        raise ValueError(f"{name}: {reason}") from None

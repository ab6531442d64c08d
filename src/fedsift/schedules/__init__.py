"""Schedules: settings that change from round to round, such as a decaying learning rate.

Every number among a method's settings may be a schedule. A schedule is a function of the round,
counted from 1: one of those below, or any function of your own.

>>> from fedsift.algorithms import fedsgd
>>> fedsgd(lr=cosine(0.1, rounds=100))
fedsgd(local_steps=30, lr=cosine(start=0.1, end=0.0, rounds=100))

Settings that are whole numbers, such as ``local_steps``, take the nearest whole number.
``schedule.py`` holds the schedules, and ``parsing.py`` reads them from text.
"""

from fedsift.schedules.parsing import parse_schedule
from fedsift.schedules.schedule import (
    Schedule,
    constant,
    cosine,
    describe,
    join,
    linear,
    linear_warmup,
    step,
)

__all__ = [
    "Schedule",
    "constant",
    "cosine",
    "describe",
    "join",
    "linear",
    "linear_warmup",
    "parse_schedule",
    "step",
]

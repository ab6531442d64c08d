"""Simulation of a federation on one machine: its preparation, and its rounds with their metrics.

``preparation.py`` checks the arguments and builds the federation, ``loop.py`` runs the rounds.
"""

from fedsift.errors import explain_renamed
from fedsift.simulation.loop import Record, initial_record, initial_snapshot, numbers_in, run_rounds
from fedsift.simulation.preparation import (
    Options,
    check_algorithm,
    chosen_device,
    engine_for,
    prepare,
)

__all__ = [
    "Options",
    "Record",
    "check_algorithm",
    "chosen_device",
    "engine_for",
    "initial_record",
    "initial_snapshot",
    "numbers_in",
    "prepare",
    "run_rounds",
]

__getattr__ = explain_renamed(__name__)

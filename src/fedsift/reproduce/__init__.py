"""The paper's table and figures, made anew from pinned configurations."""

from fedsift.reproduce.pins import PINS, Pin, Planned, Wanted, plan
from fedsift.reproduce.runner import carry_out

__all__ = ["PINS", "Pin", "Planned", "Wanted", "carry_out", "plan"]

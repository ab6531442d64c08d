"""Advice on the number of local steps, the learning rate and the density, from a calibration."""

from fedsift.advise.calibration import Advice, advise, calibration_task
from fedsift.advise.search import Choice

__all__ = ["Advice", "Choice", "advise", "calibration_task"]

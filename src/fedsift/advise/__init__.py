"""Recommend the number of local steps, the learning rate and the density from a calibration."""

from fedsift.advise.calibration import advise, calibrate, calibration_task
from fedsift.advise.hyperparameters import Hyperparameters
from fedsift.advise.recommendation import Advice

__all__ = ["Advice", "Hyperparameters", "advise", "calibrate", "calibration_task"]

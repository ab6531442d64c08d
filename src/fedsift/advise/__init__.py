"""Recommend the number of local steps, the learning rate and the density from a calibration.

- ``calibration.py``: the calibration, real rounds judged on held-out data
- ``held_out.py``: the fifth of the training data that is held out
- ``hyperparameters.py``: the settings that are chosen, and the values that are tried
- ``coordinate_search.py``: the search among them
- ``forecast.py``: the measured curve, and a power law that extrapolates it
- ``recommendation.py``: settings, rounds, reasons and next steps
"""

from fedsift.advise.calibration import advise, calibrate, calibration_task
from fedsift.advise.hyperparameters import Hyperparameters
from fedsift.advise.recommendation import Advice

__all__ = ["Advice", "Hyperparameters", "advise", "calibrate", "calibration_task"]

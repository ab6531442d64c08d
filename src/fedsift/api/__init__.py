"""The Python interface: ``fedsift.simulate``, ``fedsift.rounds`` and their result.

``functions.py`` holds the two functions, ``iterator.py`` the iterator behind both, ``result.py``
what they return, and ``settings.py`` how a run is described.
"""

from fedsift.api.functions import rounds, simulate
from fedsift.api.iterator import Rounds
from fedsift.api.result import Result

__all__ = ["Result", "Rounds", "rounds", "simulate"]

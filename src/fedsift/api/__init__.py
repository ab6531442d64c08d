"""The Python interface: ``fedsift.simulate``, ``fedsift.rounds`` and their result.

- ``functions.py``: the two functions
- ``iterator.py``: the iterator behind both
- ``result.py``: what they return
- ``start.py``: where a run begins
- ``folder.py``: runs in a folder, ``out=``
- ``settings.py``: how a run is described
- ``identity.py``: what identifies the data and the model of a run
"""

from fedsift.api.functions import rounds, simulate
from fedsift.api.iterator import Rounds
from fedsift.api.result import Result

__all__ = ["Result", "Rounds", "rounds", "simulate"]

"""Rounds of a federation: their order, the checks of uploads, and the state between rounds.

- ``round.py``: the order of a round, and only there
- ``snapshot.py``: the state between rounds
- ``cohort.py``: how many clients train in a round
- ``inbox.py``: uploads, checked, counted and added up as they arrive
- ``norm_bound.py``: refuses updates whose norm is far larger than usual
- ``memories.py``: what clients remember between rounds, in RAM or in a file
- ``secure_round.py``: secure aggregation in a simulation
- ``private_rounds.py``: the noise and the cost of differential privacy
"""

from fedsift.errors import TooFewClients
from fedsift.federation.round import Federation
from fedsift.federation.snapshot import Snapshot, Traffic

__all__ = ["Federation", "Snapshot", "TooFewClients", "Traffic"]

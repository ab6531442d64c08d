"""Rounds of a federation: their order, the checks of uploads, and the state between rounds."""

from fedsift.errors import TooFewClients
from fedsift.federation.round import Federation
from fedsift.federation.snapshot import Snapshot, Traffic

__all__ = ["Federation", "Snapshot", "TooFewClients", "Traffic"]

"""The rounds of a federation: their order, the updates that arrive, and what is remembered."""

from fedsift.errors import TooFewClients
from fedsift.federation.round import (
    Federation,
)
from fedsift.federation.snapshot import (
    Snapshot,
    Traffic,
)

__all__ = ["Federation", "Snapshot", "TooFewClients", "Traffic"]

"""The rounds of a federation: their order, the updates that arrive, and what is remembered."""

from fedsift.federation.round import Federation, Snapshot, TooFewClients, Traffic

__all__ = ["Federation", "Snapshot", "TooFewClients", "Traffic"]

"""Privacy: secure aggregation, and client-level differential privacy."""

from fedsift.privacy.differential import DifferentialPrivacy

__all__ = ["DifferentialPrivacy"]

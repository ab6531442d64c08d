"""Privacy: secure aggregation, and client-level differential privacy."""

from fedsift.privacy.differential import DifferentialPrivacy
from fedsift.privacy.secure.settings import SecureSettings

__all__ = ["DifferentialPrivacy", "SecureSettings"]

"""Privacy and hostile clients: secure aggregation, differential privacy, robust aggregation."""

from fedsift.privacy.differential import DifferentialPrivacy
from fedsift.privacy.secure.settings import SecureSettings

__all__ = ["DifferentialPrivacy", "SecureSettings"]

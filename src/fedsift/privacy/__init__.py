"""Privacy and hostile clients: secure aggregation, differential privacy, robust aggregation."""

from fedsift.privacy.differential import DifferentialPrivacy

__all__ = ["DifferentialPrivacy"]

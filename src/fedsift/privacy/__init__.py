"""Privacy and hostile clients: secure aggregation, differential privacy, robust aggregation.

- ``secure/``: secure aggregation, in which the server learns only sums
- ``differential.py``: differential privacy of each client
- ``accounting.py``: what its rounds cost
- ``distributed.py``, ``discrete_gaussian.py``: the clients' shares of the noise on a secure sum
- ``robust.py``: the median and the trimmed mean
"""

from fedsift.privacy.differential import DifferentialPrivacy
from fedsift.privacy.secure.settings import SecureSettings

__all__ = ["DifferentialPrivacy", "SecureSettings"]

"""What protects the updates of clients from the server, and the model from hostile clients."""

from __future__ import annotations

from dataclasses import dataclass

from fedsift.algorithms.method import Algorithm
from fedsift.flower.noise import check_private
from fedsift.flower.sampling import Sampling
from fedsift.privacy.differential import DifferentialPrivacy
from fedsift.privacy.robust import Aggregation, check_aggregation
from fedsift.privacy.secure.settings import SecureSettings, check_can_be_secure
from fedsift.task import Weights
from fedsift.vector import Layout


@dataclass(frozen=True)
class Protection:
    """Secure aggregation, differential privacy, robust aggregation and the norm bound."""

    secure: SecureSettings | None
    privacy: DifferentialPrivacy | None
    aggregation: Aggregation
    max_norm_ratio: float

    def check_fits(self, algorithm: Algorithm, sampling: Sampling, weights: Weights | None) -> None:
        """Refuse what does not fit the method, the sizes of its cohorts or the weights."""
        if self.secure is not None:
            check_can_be_secure(algorithm)
            self.secure.resolved(sampling.cohort_size)
        if self.privacy is not None:
            is_secure = self.secure is not None
            check_private(algorithm, self.privacy, weights, is_secure, sampling.enough)
        check_aggregation(self.aggregation, algorithm)

    def check_buffers(self, layout: Layout, buffers: str) -> None:
        """Refuse running statistics that clients would send in the clear."""
        if self.secure and layout.buffers and buffers == "average":
            raise ValueError(
                'buffers="average" sends each client\'s running statistics in the clear: with '
                'secure aggregation, choose buffers="local" or "frozen"'
            )

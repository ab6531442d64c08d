"""The settings that ``fedsift advise`` chooses, and the values it tries for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedsift.algorithms.fedadam_ssm import shared_mask_bits
from fedsift.runs.compare import MIBIT


@dataclass(frozen=True, order=True)
class Hyperparameters:
    """The settings of FedAdam-SSM that are chosen; the defaults are the paper's."""

    local_steps: int = 30
    lr: float = 1e-3
    density: float = 0.05

    def __str__(self) -> str:
        """Return the settings as text.

        >>> print(Hyperparameters())
        L = 30, lr 0.001, density 0.05
        """
        return f"L = {self.local_steps}, lr {self.lr:g}, density {self.density:g}"

    def mibit(self, d: int) -> float:
        """Return the uplink per client and round in Mibit, by the paper's formula.

        >>> round(Hyperparameters().mibit(21_840), 3)
        0.115
        """
        return shared_mask_bits(self.density, d) / MIBIT


CANDIDATES: Mapping[str, tuple[float, ...]] = {
    "lr": (3e-4, 1e-3, 3e-3, 1e-2),
    "density": (0.05, 0.01, 0.002),
    "local_steps": (30, 10, 90),
}
"""The values that are tried for each setting."""

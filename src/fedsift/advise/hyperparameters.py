"""The settings that ``fedsift advise`` chooses, and the values it tries for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedsift.algorithms import Algorithm, find
from fedsift.runs.compare import MIBIT


@dataclass(frozen=True, order=True)
class Hyperparameters:
    """The method and the settings that are chosen; the defaults are the paper's."""

    local_steps: int = 30
    lr: float = 1e-3
    density: float = 0.05
    algorithm: str = "fedadam-ssm"

    def __str__(self) -> str:
        """Return the settings as text.

        >>> print(Hyperparameters())
        fedadam-ssm, L = 30, lr 0.001, density 0.05
        """
        return f"{self.algorithm}, L = {self.local_steps}, lr {self.lr:g}, density {self.density:g}"

    @property
    def method(self) -> Algorithm:
        """The method with these settings."""
        make = find(self.algorithm)
        return make(local_steps=self.local_steps, lr=self.lr, density=self.density)

    def mibit(self, d: int) -> float:
        """Return the uplink per client and round in Mibit, by the paper's formula.

        >>> round(Hyperparameters().mibit(21_840), 3)
        0.115
        """
        return self.method.phase(1).paper_bits(d) / MIBIT


CANDIDATES: Mapping[str, tuple[float, ...]] = {
    "lr": (3e-4, 1e-3, 3e-3, 1e-2),
    "density": (0.05, 0.01, 0.002),
    "local_steps": (30, 10, 90),
}
"""The values that are tried for each setting."""

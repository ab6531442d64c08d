"""The settings that ``fedsift advise`` chooses, and the values it tries for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedsift.algorithms import Algorithm, find
from fedsift.algorithms.buffers import with_buffers
from fedsift.runs.compare import MIBIT
from fedsift.vector import Layout


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

    def method_for(self, layout: Layout) -> Algorithm:
        """Return the method with these settings, which also averages a layout's buffers."""
        return with_buffers(self.method, layout, "average")

    def mibit(self, layout: Layout) -> float:
        """Return the uplink per client and round in Mibit, by the paper's formula.

        >>> from torch import nn
        >>> round(Hyperparameters().mibit(Layout.of(nn.Linear(1023, 1024))), 3)
        5.8
        """
        return self.method_for(layout).phase(1).paper_bits(layout.d) / MIBIT


CANDIDATES: Mapping[str, tuple[float, ...]] = {
    "lr": (3e-4, 1e-3, 3e-3, 1e-2),
    "density": (0.05, 0.01, 0.002),
    "local_steps": (30, 10, 90),
}
"""The values that are tried for each setting."""

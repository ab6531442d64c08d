"""Training code of the user's own: which methods allow it, and the optimizer of the round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor, nn

from fedsift.adam import AdamStep
from fedsift.algorithms.fedavg import HeavyBallStep
from fedsift.algorithms.fedsgd import SgdStep
from fedsift.algorithms.method import Algorithm, Phase, from_global
from fedsift.optim import Adam
from fedsift.vector import Layout, State


def takes_adam_steps(phase: Phase) -> bool:
    """Whether local training is what :class:`fedsift.Adam` does, from the global moments."""
    return isinstance(phase.step, AdamStep) and phase.local_start is from_global


def allows_any_optimizer(phase: Phase) -> bool:
    """Whether a method only needs ΔW, and so works with any optimizer on the clients."""
    return isinstance(phase.step, SgdStep | HeavyBallStep)


def check_own_training(algorithm: Algorithm, round: int) -> None:
    """Refuse a method whose local steps cannot be the user's.

    >>> from fedsift.algorithms import fedavg, fedprox
    >>> check_own_training(fedavg(), round=1)
    >>> check_own_training(fedprox(), round=1)
    Traceback (most recent call last):
    ...
    ValueError: fedprox has local steps of its own in round 1, which train functions cannot take: \
use client_app, or a method such as compressed(fedavg())
    """
    phase = algorithm.phase(round)
    if not (allows_any_optimizer(phase) or takes_adam_steps(phase)):
        raise ValueError(
            f"{algorithm.name} has local steps of its own in round {round}, which train functions "
            "cannot take: use client_app, or a method such as compressed(fedavg())"
        )


def optimizer_for(model: nn.Module) -> Adam:
    """Return the optimizer of the round for a model: the paper's Adam with the global moments.

    Train functions of an app with :func:`fedsift.flower.sifted` call it if the method averages
    Adam's moments (``fedadam``, ``fedadam_ssm`` and its relatives, ``sift``). The learning rate and
    all other settings are those of the method.
    """
    current = CURRENT.get()
    if current is None:
        raise RuntimeError(
            "optimizer_for needs a round in progress: call it in the train function of a ClientApp "
            "with the mod fedsift.flower.sifted"
        )
    return current.make(model)


@dataclass
class RoundOptimizer:
    """Makes the optimizer of a round, and reads the moments from it after training.

    ``m`` and ``v`` are the moments ``(d,)`` from which the next optimizer starts.
    """

    algorithm: Algorithm
    layout: Layout
    step: object
    m: Tensor
    v: Tensor
    made: Adam | None = None
    names: list[str] = field(default_factory=list)

    def make(self, model: nn.Module) -> Adam:
        """Return an optimizer of the trainable parameters, with the moments of the round so far."""
        if not isinstance(self.step, AdamStep):
            name = self.algorithm.name
            raise ValueError(f"{name} has no moments: use any optimizer of torch.optim instead")
        self.read()
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if unknown := [name for name in named if name not in self.layout.layers]:
            raise ValueError(f"the server's model has no parameter {unknown[0]!r}")
        self.names = list(named)
        self.made = Adam(named.values(), **asdict(self.step))
        self.made.load_moments(self.select(self.m), self.select(self.v))
        return self.made

    def select(self, x: Tensor) -> Tensor:
        """Return the coordinates of the optimizer's parameters."""
        return torch.cat([x[self.layout.layers[name]] for name in self.names])

    def read(self) -> None:
        """Take over the moments of the last optimizer, if there is one."""
        if self.made is None:
            return
        sizes = [x.stop - x.start for x in (self.layout.layers[name] for name in self.names)]
        for total, flat in zip((self.m, self.v), self.made.moments(), strict=True):
            for name, part in zip(self.names, torch.split(flat, sizes), strict=True):
                total[self.layout.layers[name]] = part.to(total)

    def end(self, start: State) -> State:
        """Return the start of the round with the moments after training."""
        if not isinstance(self.step, AdamStep):
            return start
        if self.made is None:
            raise ValueError(
                f"{self.algorithm.name} averages Adam's moments: make the optimizer with "
                "fedsift.flower.optimizer_for(model), or choose a method for any optimizer, such "
                "as compressed(fedavg())"
            )
        self.read()
        return start.replace(m=self.m[None], v=self.v[None])


CURRENT: ContextVar[RoundOptimizer | None] = ContextVar("round", default=None)
"""The optimizer of the round in progress."""


@contextmanager
def round_optimizer(
    algorithm: Algorithm, layout: Layout, phase: Phase, start: State
) -> Iterator[RoundOptimizer]:
    """Let :func:`optimizer_for` return the optimizer of a round that begins at ``start``."""
    m, v = (start[name][0].clone() if name in start else start.w[0] for name in ("m", "v"))
    current = RoundOptimizer(algorithm, layout, phase.step, m, v)
    token = CURRENT.set(current)
    try:
        yield current
    finally:
        CURRENT.reset(token)

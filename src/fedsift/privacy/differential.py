"""Client-level differential privacy: what is published hardly depends on any single client.

H. B. McMahan, D. Ramage, K. Talwar and L. Zhang, "Learning Differentially Private Recurrent
Language Models", ICLR 2018. In each round every client takes part with the same probability,
independently of the others. The server scales each update down to a bounded norm, adds them up,
adds Gaussian noise, and divides by the expected number of clients:

    mean = (Σ_n min(1, C / ‖Δ_n‖) Δ_n + N(0, (z C)² I)) / (participation · clients)

If clients send several vectors, each of the R vectors has a bound C of its own, and noise with
standard deviation √R z C.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsift.algorithms.example_message import smallest_message
from fedsift.algorithms.method import Algorithm
from fedsift.codec.update import CodedValues, Part, Parts, Role
from fedsift.errors import ConfigError
from fedsift.privacy.accounting import epsilon_after, noise_for, require_dp_accounting
from fedsift.privacy.distributed import DistributedNoise
from fedsift.seeding import stream
from fedsift.vector import State

Noise = Callable[[Tensor, str], Tensor]
"""Returns standard normal noise like a vector, given the vector and its role."""
CLIPPED: tuple[Role, ...] = ("w", "m", "v", "p")
"""Roles that may be sent with differential privacy."""


@dataclass(frozen=True)
class DifferentialPrivacy:
    """Clip each client's update, and add Gaussian noise to their sum.

    Parameters
    ----------
    clip
        The largest L2 norm of an update, or one per vector for methods that send several, such as
        ``{"w": 1.0, "m": 0.1, "v": 0.01}``. Larger updates are scaled down.
    noise
        The standard deviation of the noise on the sum of the updates, divided by ``clip``. None
        chooses the smallest noise with which all rounds cost at most ``epsilon``.
    epsilon
        The budget ε. Training stops before a round that would exceed it. None has no limit.
    delta
        The δ for which ε is computed. It should be well below 1 / clients.

    Examples
    --------
    >>> DifferentialPrivacy(clip=1.0, epsilon=2.0).calibrated(rate=0.1, rounds=30).noise > 1
    True

    """

    clip: float | Mapping[str, float]
    noise: float | None = None
    epsilon: float | None = None
    delta: float = 1e-5

    def __post_init__(self) -> None:
        if self.noise is None and self.epsilon is None:
            raise ConfigError("differential privacy needs noise or epsilon")
        clips = {f"clip of {role.upper()}": x for role, x in self.bounds.items()}
        for name, x in {**clips, "noise": self.noise, "epsilon": self.epsilon}.items():
            if x is not None and not (math.isfinite(x) and x > 0):
                raise ConfigError(f"{name} must be a positive number, got {x!r}")
        if not 0 < self.delta < 1:
            raise ConfigError(f"delta must be between 0 and 1, got {self.delta!r}")

    def settings(self) -> dict[str, float]:
        """Return the settings by their names on the command line.

        >>> DifferentialPrivacy(clip={"w": 1.0, "m": 0.1}, noise=2.0).settings()
        {'dp_clip': 1.0, 'dp_clip_m': 0.1, 'dp_noise': 2.0, 'dp_epsilon': 0.0, 'dp_delta': 1e-05}
        """
        clips = {option_of(role): bound for role, bound in self.bounds.items()}
        budget = {"dp_epsilon": self.epsilon or 0.0, "dp_delta": self.delta}
        return {**clips, "dp_noise": self.noise or 0.0, **budget}

    @property
    def bounds(self) -> Mapping[str, float]:
        """The largest norm per vector; a single number is that of the only vector sent."""
        return self.clip if isinstance(self.clip, Mapping) else {"w": self.clip}

    def calibrated(self, rate: float, rounds: int) -> DifferentialPrivacy:
        """Return the same with the noise for all rounds, if it is not given."""
        require_dp_accounting()
        if self.noise is not None or self.epsilon is None:
            return self
        return replace(self, noise=noise_for(self.epsilon, self.delta, rate, rounds))

    def distributed(self, fewest: int, most: int, values: int) -> DistributedNoise:
        """Return the noise that each client adds to its values of a secure sum.

        A sum has from ``fewest`` to ``most`` clients.
        """
        return DistributedNoise(self.bound("p"), self.multiplier, fewest, most, values)

    def spent(self, rounds: int, rate: float) -> float:
        """Return ε after some rounds."""
        return epsilon_after(rounds, self.multiplier, rate, self.delta)

    @property
    def multiplier(self) -> float:
        """The noise multiplier z."""
        if self.noise is None:
            raise ValueError("the noise is not known yet: call calibrated first")
        return self.noise

    def bound(self, role: str) -> float:
        """Return the largest norm of a vector of an update."""
        if not isinstance(self.clip, Mapping) and role == "p":
            return self.clip
        if role not in self.bounds:
            given = ", ".join(name.upper() for name in self.bounds)
            raise ConfigError(
                f"the method also sends {role.upper()}: give a clip for it, not only for {given}"
            )
        return self.bounds[role]

    def clipped(self, parts: Parts) -> Parts:
        """Return clients' updates, each vector scaled down to its bound.

        >>> from fedsift.codec.update import dense
        >>> private = DifferentialPrivacy(clip=1.0, noise=1.0)
        >>> (part,) = private.clipped(dense({"w": torch.tensor([[3.0, 4.0], [0.3, 0.4]])}))
        >>> part.values["w"].restore()
        tensor([[0.6000, 0.8000],
                [0.3000, 0.4000]])
        """
        return tuple(
            Part(
                part.indices,
                {
                    role: CodedValues.of(scaled_down(coded.restore(), self.bound(role)))
                    for role, coded in part.values.items()
                },
            )
            for part in parts
        )

    def noisy_mean(
        self, total: State, roles: tuple[Role, ...], expected: float, noise: Noise
    ) -> State:
        """Return the sum of clipped updates with noise, divided by the expected number of clients.

        Vectors that no client sends stay as they are.
        """
        noisy = {}
        for role in roles:
            deviation = math.sqrt(len(roles)) * self.multiplier * self.bound(role)
            noisy[role] = total[role] + deviation * noise(total[role], role)
        return total.replace(**noisy).map(lambda x: x / expected)


def option_of(role: str) -> str:
    """Return the option that sets the clip of a vector."""
    return "dp_clip" if role in ("w", "p") else f"dp_clip_{role}"


def scaled_down(x: Tensor, bound: float) -> Tensor:
    """Return rows whose L2 norm is at most the bound.

    The norm is computed in float64, so that it cannot overflow.

    >>> scaled_down(torch.tensor([[0.0, 0.0], [6.0, 8.0]]), 5.0)
    tensor([[0., 0.],
            [3., 4.]])
    """
    norms = x.double().norm(dim=-1, keepdim=True)
    scale: Tensor = bound / norms.clamp_min(bound)
    return x * scale.to(x.dtype)


def seeded_noise(seed: int) -> Noise:
    """Return standard normal noise that follows from a seed, the same on every device."""

    def noise(like: Tensor, role: str) -> Tensor:
        draw = stream(seed, "noise for differential privacy", role)
        return torch.from_numpy(draw.standard_normal(like.numel())).to(like)

    return noise


def private_roles(algorithm: Algorithm, privacy: DifferentialPrivacy) -> tuple[Role, ...]:
    """Return the vectors that a method's clients send; refuse a method that cannot be private.

    >>> from fedsift.algorithms import fedavg, sift
    >>> private_roles(fedavg(), DifferentialPrivacy(clip=1.0, noise=1.0))
    ('w',)
    """
    if "b" in algorithm.state:
        raise ConfigError(
            f"{algorithm.name} cannot be private while it trains running statistics, to which no "
            'noise is added: choose buffers="frozen"'
        )
    parts = smallest_message(algorithm)
    roles = tuple(role for part in parts for role in part.values)
    if not roles:
        raise not_private(algorithm.name, "its messages depend on the model")
    if any(part.indices is not None for part in parts):
        if "nominate" in algorithm.settings:
            raise ConfigError(
                f"{algorithm.name} cannot be private while its clients name coordinates: set "
                "nominate to false"
            )
        raise not_private(algorithm.name, "its clients choose which coordinates they send")
    for role in roles:
        if role not in CLIPPED:
            raise not_private(algorithm.name, f"the mean of {role.upper()} must be exact")
        privacy.bound(role)
    return roles


def not_private(name: str, why: str) -> ConfigError:
    """Return the error for a method that cannot be private."""
    return ConfigError(
        f"{name} cannot be private: {why}; choose a method that sends everything in full, such as "
        "fedavg"
    )

"""Differential privacy on Flower: noise that the server draws, and that no client can compute.

Clients know the seed of a run, and with it who takes part. The noise is therefore drawn from the
operating system, and ε is counted as if every client took part in every round.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedsift.algorithms.method import Algorithm
from fedsift.errors import ConfigError
from fedsift.privacy.differential import DifferentialPrivacy, private_roles
from fedsift.runs.disk import replace_file
from fedsift.task import Weights

RATE = 1.0
"""The sampling rate for which ε is computed: clients know each round's cohort."""
PIECE = 1 << 20
"""Numbers drawn at a time, to save memory."""


@dataclass(frozen=True)
class NoiseDraws:
    """Counts in a file how often noise was drawn.

    A server that is stopped may have sent out the model of a round that it then repeats with other
    noise. Both models cost privacy, so draws are counted and not rounds.
    """

    file: Path

    def count_after(self, rounds: int) -> int:
        """Return the number of draws so far: at least one per finished round.

        The rounds count by themselves, so that a lost file does not make a run look more private.
        """
        return max(self.recorded(), rounds)

    def add(self, round: int) -> None:
        """Count the draw of a round, before anything with its noise can be sent."""
        count = self.count_after(round - 1) + 1
        replace_file(self.file, f"{count}\n".encode())

    def recorded(self) -> int:
        """Return the number in the file; 0 without a file."""
        try:
            return int(self.file.read_text("utf-8"))
        except FileNotFoundError:
            return 0
        except ValueError:
            raise ConfigError(
                f"{self.file} is corrupt: it must hold how often noise was drawn, which is at "
                "least the number of finished rounds"
            ) from None


def secret_noise(like: Tensor, role: str) -> Tensor:
    """Return standard normal noise from the operating system's random numbers.

    A generator such as NumPy's could be recognized by whoever knows all but one of the updates.
    """
    noise = torch.empty_like(like)
    for start in range(0, len(noise), PIECE):
        piece = noise[start : start + PIECE]
        random = os.urandom(16 * -(-len(piece) // 2))
        piece.copy_(normals_of(random)[: len(piece)])
    return noise


def normals_of(random: bytes) -> Tensor:
    """Return one standard normal number for every eight random bytes, by Box and Muller.

    >>> normals_of(bytes(16)).tolist()[0] == math.sqrt(-2 * math.log(2**-54))
    True
    """
    whole = torch.frombuffer(bytearray(random), dtype=torch.int64) >> 11 & (1 << 53) - 1
    first, second = ((whole.double() + 0.5) * 2**-53).chunk(2)
    radius, angle = (-2 * first.log()).sqrt(), 2 * math.pi * second
    return torch.cat([radius * angle.cos(), radius * angle.sin()])


def check_private(
    algorithm: Algorithm,
    privacy: DifferentialPrivacy,
    weights: Weights | None,
    secure: bool,
    enough: int | None,
) -> None:
    """Refuse what cannot be private on Flower."""
    private_roles(algorithm, privacy)
    if weights not in (None, "equal"):
        raise ValueError(f"differential privacy needs weights='equal', got {weights!r}")
    if secure:
        raise ValueError(
            "on Flower, the server adds the noise, which it cannot do to a secure sum: pass "
            "privacy or secure, not both"
        )
    if enough is not None:
        raise ValueError(
            "with enough, the update of one client decides whether another's is merged, which the "
            "noise does not hide: pass privacy or enough, not both"
        )

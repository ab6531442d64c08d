"""Differential privacy on Flower: noise that the server draws, and that no client can compute.

Clients know the seed of a run, and with it who takes part. The noise is therefore drawn from the
operating system, and ε is counted as if every client took part in every round.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from fedsift.algorithms.method import Algorithm
from fedsift.privacy.differential import DifferentialPrivacy, private_roles
from fedsift.runs.disk import replace_file
from fedsift.task import Weights

RATE = 1.0
"""The sampling rate for which ε is computed: clients know each round's cohort."""


@dataclass(frozen=True)
class NoiseDraws:
    """Counts in a file how often noise was drawn.

    A server that is stopped may have sent out the model of a round that it then repeats with other
    noise. Both models cost privacy, so draws are counted and not rounds.
    """

    file: Path

    @property
    def count(self) -> int:
        """The number of draws so far."""
        return int(self.file.read_text("utf-8")) if self.file.exists() else 0

    def seed(self) -> int:
        """Count a draw, and return its seed."""
        replace_file(self.file, f"{self.count + 1}\n".encode())
        return secrets.randbits(128)


def check_private(
    algorithm: Algorithm,
    privacy: DifferentialPrivacy,
    weights: Weights | None,
    secure: bool,
    enough: int | None,
) -> None:
    """Refuse what cannot be private on Flower.

    The noise covers that one client's update is in a sum or not. With ``enough``, a client's reply
    also decides whose update no longer is.
    """
    private_roles(algorithm, privacy)
    if weights not in (None, "equal"):
        raise ValueError(f"differential privacy needs weights='equal', got {weights!r}")
    if enough is not None:
        raise ValueError(
            "differential privacy needs a round's sum of all clients that reply, but with enough, a "
            "client's reply keeps that of another one out: leave out enough"
        )
    if secure:
        raise ValueError(
            "on Flower, the server adds the noise, which it cannot do to a secure sum: pass "
            "privacy or secure, not both"
        )

"""What a receiver expects of a frame."""

from __future__ import annotations

from dataclasses import dataclass

from fedsift.codec.update import Role, Update

Shape = tuple[tuple[tuple[Role, ...], int | None, tuple[int, ...]], ...]
"""By part: its roles, how many coordinates (None: every one), and the wire ids of its coders."""


@dataclass(frozen=True)
class Limits:
    """What the receiver expects; a frame outside it is refused. None: anything goes.

    ``max_abs`` bounds the values of W and M; those of V, which are squares, by its square.
    """

    run: bytes | None = None
    round: int | None = None
    base: bytes | None = None
    algorithm: str | None = None
    client: int | None = None
    shape: Shape | None = None
    weight: float | None = None
    min_weight: float = 0.0
    max_weight: float = float("inf")
    max_abs: float = 1e6


def shape_of(update: Update) -> Shape:
    """What an update looks like, whatever its values.

    >>> import torch
    >>> from fedsift.codec.update import dense
    >>> shape_of(Update(dense({"w": torch.ones(1, 2)}), (1.0,)))
    ((('w',), None, (2,)),)
    """
    return tuple(
        (
            tuple(part.values),
            None if part.indices is None else part.indices.shape[-1],
            tuple(coded.coder.wire_id for coded in part.values.values()),
        )
        for part in update.parts
    )

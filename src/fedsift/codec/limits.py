"""What a receiver expects of a frame: :class:`Limits`."""

from __future__ import annotations

from dataclasses import dataclass

from fedsift.codec.update import Role, Update

Shape = tuple[tuple[tuple[Role, ...], int | None, tuple[int, ...]], ...]
"""Per part: its roles, its number of coordinates (None: all), and its coders' wire ids."""


@dataclass(frozen=True)
class Limits:
    """The expected fields and bounds of a frame; None accepts any value.

    ``max_abs`` bounds the magnitudes of W and M; its square bounds those of V, which are squares.
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
    """Return an update's shape: roles, numbers of coordinates and coders, independent of values.

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

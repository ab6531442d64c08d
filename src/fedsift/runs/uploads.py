"""Statistics of a round's uploads: bytes by part, masks, magnitudes.

A federation calls :meth:`Uploads.add` with each upload that it merges. Everything is counted on the
device of the tensors; a GPU synchronizes with the host once per round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedsift.codec.frame import Spec
from fedsift.codec.inspect import bytes_by_part
from fedsift.codec.update import PAYLOADS, Part, Update

LOWEST, HIGHEST, PER_DECADE = -20, 4, 10
"""Magnitudes are counted from 10^LOWEST to 10^HIGHEST, in PER_DECADE bins per decade."""
BINS = (HIGHEST - LOWEST) * PER_DECADE
MOST_VALUES = 1 << 16
"""Magnitudes counted per upload and role; if there are more values, every n-th is counted."""
MOST_CLIENTS = 20
"""The masks of the first MOST_CLIENTS clients are compared pair by pair."""
MOST_PENDING = 1 << 22
"""Number of indices to collect before counting them."""


def is_sampled(round: int) -> bool:
    """Whether magnitudes and pairs are recorded: in rounds 1, 2, 5, 10, 20, 50 and so on.

    >>> [n for n in range(1, 1001) if is_sampled(n)]
    [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
    """
    return str(round).rstrip("0") in ("1", "2", "5")


@dataclass
class MaskCounts:
    """How often the masks of one kind selected each coordinate."""

    times: Tensor
    added: int = 0
    counted: int = 0
    pending: list[Tensor] = field(default_factory=list)
    first_masks: list[Tensor] = field(default_factory=list)

    def add(self, indices: Tensor, is_sampled: bool) -> None:
        """Add the masks ``(clients, k)`` of some clients."""
        self.added += indices.numel()
        self.pending.append(indices.reshape(-1))
        if is_sampled:
            self.first_masks += indices[: MOST_CLIENTS - len(self.first_masks)]
        if self.added - self.counted > MOST_PENDING:
            self.count()

    def count(self) -> None:
        """Count the pending indices."""
        pending = torch.cat(self.pending)
        self.times.scatter_add_(0, pending, torch.ones_like(pending, dtype=torch.int32))
        self.pending.clear()
        self.counted = self.added

    def overlap_and_union(self) -> Tensor:
        """Return the coordinates that ordered pairs of clients share, and the union's size."""
        if self.pending:
            self.count()
        times = self.times.to(torch.int64)
        return torch.stack([(times * (times - 1)).sum(), (times > 0).sum()])

    def shared(self) -> Tensor:
        """Return the coordinates that each pair of the first clients shares, row by row."""
        every = torch.cat(self.first_masks)
        owner = torch.cat([torch.full_like(x, n) for n, x in enumerate(self.first_masks)])
        rows = []
        for indices in self.first_masks:
            is_in = torch.zeros_like(self.times).index_fill_(0, indices, 1)
            row = every.new_zeros(len(self.first_masks))
            rows.append(row.scatter_add_(0, owner, is_in[every].to(row.dtype)))
        return torch.cat(rows)


class Uploads:
    """Collects the uploads of a round; :meth:`finish_round` returns its line of uploads.jsonl."""

    def __init__(self, d: int) -> None:
        self.d = d
        self._clear()

    def _clear(self) -> None:
        self.clients: list[int] = []
        self.bytes: Counter[str] = Counter()
        self.masks: dict[str, MaskCounts] = {}
        self.magnitudes: dict[str, Tensor] = {}

    def add(self, specs: Sequence[Spec], update: Update, sizes: Sequence[int]) -> None:
        """Add the uploads of some clients."""
        self.clients += [spec.client for spec in specs]
        self.bytes.update(bytes_by_part(update, specs, sizes))
        for part in update.parts:
            self._add_part(part, is_sampled(specs[0].round))

    def _add_part(self, part: Part, has_samples: bool) -> None:
        if part.indices is not None:
            indices, roles = part.indices, "".join(part.values)
            if roles not in self.masks:
                times = torch.zeros(self.d, dtype=torch.int32, device=indices.device)
                self.masks[roles] = MaskCounts(times)
            self.masks[roles].add(indices, has_samples)
        if has_samples:
            for role, coded in part.values.items():
                if role in PAYLOADS:
                    continue
                counted = magnitudes_of(coded.restore())
                self.magnitudes[role] = self.magnitudes.get(role, 0) + counted

    def finish_round(self, round: int) -> dict[str, Any]:
        """Return the statistics of the round as a JSON object, and start the next round."""
        has_samples = is_sampled(round)
        pieces = [mask.overlap_and_union() for mask in self.masks.values()]
        pieces += self.magnitudes.values()
        pieces += [mask.shared() for mask in self.masks.values()] if has_samples else []
        numbers = iter(torch.cat(pieces).tolist() if pieces else ())  # synchronizes a GPU, once
        n = len(self.clients)
        line: dict[str, Any] = {"round": round, "uploads": n, "bytes": dict(self.bytes)}
        line["masks"] = {
            roles: mask_statistics(next(numbers), next(numbers), mask.added, n, self.d)
            for roles, mask in self.masks.items()
        }
        if has_samples:
            line["magnitudes"] = {
                role: histogram(take(numbers, BINS + 2)) for role in self.magnitudes
            }
            line["clients"] = self.clients[:MOST_CLIENTS]
            line["shared"] = {
                roles: [take(numbers, len(mask.first_masks)) for _ in mask.first_masks]
                for roles, mask in self.masks.items()
            }
        self._clear()
        return line


def mask_statistics(shared: int, union: int, total: int, clients: int, d: int) -> dict[str, Any]:
    """Return the coordinates per client, the mean overlap of two clients and the union's share.

    >>> mask_statistics(shared=4, union=6, total=8, clients=2, d=12)
    {'kept': 4.0, 'overlap': 0.5, 'union': 0.5}
    """
    of_all_pairs = total * (clients - 1)
    return {
        "kept": total / clients,
        "overlap": shared / of_all_pairs if of_all_pairs else None,
        "union": union / d,
    }


def histogram(counts: list[int]) -> dict[str, Any]:
    """Return the counts per bin without empty bins at both ends, and the counts outside all bins.

    >>> histogram([7] + [0] * 200 + [1, 2] + [0] * 39)
    {'from': 0.0, 'step': 0.1, 'counts': [1, 2], 'outside': 7}
    """
    inner = counts[1:-1]
    filled = [place for place, count in enumerate(inner) if count] or [0]
    return {
        "from": LOWEST + filled[0] / PER_DECADE,
        "step": 1 / PER_DECADE,
        "counts": inner[filled[0] : filled[-1] + 1],
        "outside": counts[0] + counts[-1],
    }


def magnitudes_of(x: Tensor) -> Tensor:
    """Return how many values lie in each bin of log₁₀|x|; the first and the last bin are open.

    >>> counted = magnitudes_of(torch.tensor([0.0, 1.1, -1.2, 1e30]))
    >>> [(place, n) for place, n in enumerate(counted.tolist()) if n]
    [(0, 1), (201, 2), (241, 1)]
    """
    some = x[..., :: -(-x.shape[-1] // MOST_VALUES) or 1].reshape(-1)
    place = ((some.abs().log10() - LOWEST) * PER_DECADE).floor().clamp(-1, BINS).to(torch.int64) + 1
    counts = torch.zeros(BINS + 2, dtype=torch.int64, device=x.device)
    return counts.scatter_add_(0, place, torch.ones_like(place))


def take(numbers: Iterator[int], count: int) -> list[int]:
    """Return the next numbers.

    >>> take(iter([1, 2, 3]), 2)
    [1, 2]
    """
    return [next(numbers) for _ in range(count)]

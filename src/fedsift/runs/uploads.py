"""What a round's uploads look like, in a few numbers: bytes by part, masks, magnitudes.

A federation calls :meth:`Uploads.take` with each upload that it merges. Everything is counted where
the tensors are; a GPU synchronizes with the host once a round.
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
from fedsift.codec.update import Part, Update
from fedsift.task import Task

LOWEST, HIGHEST, PER_DECADE = -20, 4, 10
"""Magnitudes are counted from 10^LOWEST to 10^HIGHEST, in so many bins a decade."""
BINS = (HIGHEST - LOWEST) * PER_DECADE
MOST_VALUES = 1 << 16
"""Values of one upload and role whose magnitudes are counted; of more, an even choice."""
MOST_CLIENTS = 20
"""Clients of which each pair is compared."""
MOST_CLASSES = 1000
"""With more, labels are no classes to draw."""
MOST_PENDING = 1 << 22
"""Indices that wait to be counted together."""


def is_looked_at(round: int) -> bool:
    """Whether magnitudes and pairs are recorded: in rounds 1, 2, 5, 10, 20, 50 and so on.

    >>> [n for n in range(1, 1001) if is_looked_at(n)]
    [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
    """
    return str(round).rstrip("0") in ("1", "2", "5")


@dataclass
class Chosen:
    """How often each coordinate was chosen by the masks of one kind."""

    times: Tensor
    kept: int = 0
    counted: int = 0
    pending: list[Tensor] = field(default_factory=list)
    first: list[Tensor] = field(default_factory=list)

    def add(self, indices: Tensor, keep: bool) -> None:
        """Take the masks ``(clients, k)`` of some clients."""
        self.kept += indices.numel()
        self.pending.append(indices.reshape(-1))
        if keep:
            self.first += indices[: MOST_CLIENTS - len(self.first)]
        if self.kept - self.counted > MOST_PENDING:
            self.count()

    def count(self) -> None:
        """Count what waits."""
        waiting = torch.cat(self.pending)
        self.times.scatter_add_(0, waiting, torch.ones_like(waiting, dtype=torch.int32))
        self.pending.clear()
        self.counted = self.kept

    def told(self) -> Tensor:
        """Coordinates that two clients share, summed over ordered pairs; and the union's size."""
        if self.pending:
            self.count()
        times = self.times.to(torch.int64)
        return torch.stack([(times * (times - 1)).sum(), (times > 0).sum()])

    def shared(self) -> Tensor:
        """Coordinates that each pair of the first clients shares, as a square row by row."""
        every = torch.cat(self.first)
        owner = torch.cat([torch.full_like(x, n) for n, x in enumerate(self.first)])
        rows = []
        for indices in self.first:
            is_in = torch.zeros_like(self.times).index_fill_(0, indices, 1)
            row = every.new_zeros(len(self.first))
            rows.append(row.scatter_add_(0, owner, is_in[every].to(row.dtype)))
        return torch.cat(rows)


class Uploads:
    """Watches a federation's uploads; :meth:`sum_up` gives a round's line of uploads.jsonl."""

    def __init__(self, d: int) -> None:
        self.d = d
        self._begin()

    def _begin(self) -> None:
        self.clients: list[int] = []
        self.bytes: Counter[str] = Counter()
        self.masks: dict[str, Chosen] = {}
        self.magnitudes: dict[str, Tensor] = {}

    def take(self, specs: Sequence[Spec], update: Update, sizes: Sequence[int]) -> None:
        """Take note of some clients' uploads."""
        self.clients += [spec.client for spec in specs]
        self.bytes.update(bytes_by_part(update, specs, sizes))
        for part in update.parts:
            self._take_part(part, is_looked_at(specs[0].round))

    def _take_part(self, part: Part, look: bool) -> None:
        if part.indices is not None:
            indices, roles = part.indices, "".join(part.values)
            if roles not in self.masks:
                times = torch.zeros(self.d, dtype=torch.int32, device=indices.device)
                self.masks[roles] = Chosen(times)
            self.masks[roles].add(indices, keep=look)
        if look:
            for role, coded in part.values.items():
                counted = magnitudes_of(coded.restore())
                self.magnitudes[role] = self.magnitudes.get(role, 0) + counted

    def sum_up(self, round: int) -> dict[str, Any]:
        """The round in one JSON object; then the next round begins."""
        look = is_looked_at(round)
        pieces = [*(mask.told() for mask in self.masks.values()), *self.magnitudes.values()]
        pieces += [mask.shared() for mask in self.masks.values()] if look else []
        told = iter(torch.cat(pieces).tolist() if pieces else ())  # synchronizes a GPU, once
        n = len(self.clients)
        line: dict[str, Any] = {"round": round, "uploads": n, "bytes": dict(self.bytes)}
        line["masks"] = {
            roles: masks_in_words(next(told), next(told), mask.kept, n, self.d)
            for roles, mask in self.masks.items()
        }
        if look:
            line["magnitudes"] = {
                role: magnitudes_in_words(take(told, BINS + 2)) for role in self.magnitudes
            }
            line["clients"] = self.clients[:MOST_CLIENTS]
            line["shared"] = {
                roles: [take(told, len(mask.first)) for _ in mask.first]
                for roles, mask in self.masks.items()
            }
        self._begin()
        return line


def masks_in_words(shared: int, union: int, kept: int, clients: int, d: int) -> dict[str, Any]:
    """A round's masks: a client's coordinates, the mean overlap of two clients, the union's share.

    >>> masks_in_words(shared=4, union=6, kept=8, clients=2, d=12)
    {'kept': 4.0, 'overlap': 0.5, 'union': 0.5}
    """
    of_all_pairs = kept * (clients - 1)
    return {
        "kept": kept / clients,
        "overlap": shared / of_all_pairs if of_all_pairs else None,
        "union": union / d,
    }


def magnitudes_in_words(counts: list[int]) -> dict[str, Any]:
    """Counts by bin, without the empty bins at both ends; the outer bins are counted apart.

    >>> magnitudes_in_words([7] + [0] * 200 + [1, 2] + [0] * 39)
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
    """How many values lie in each bin of log₁₀|x|; the first and the last bin are open.

    >>> counted = magnitudes_of(torch.tensor([0.0, 1.1, -1.2, 1e30]))
    >>> [(place, n) for place, n in enumerate(counted.tolist()) if n]
    [(0, 1), (201, 2), (241, 1)]
    """
    some = x[..., :: -(-x.shape[-1] // MOST_VALUES) or 1].reshape(-1)
    place = ((some.abs().log10() - LOWEST) * PER_DECADE).floor().clamp(-1, BINS).to(torch.int64) + 1
    counts = torch.zeros(BINS + 2, dtype=torch.int64, device=x.device)
    return counts.scatter_add_(0, place, torch.ones_like(place))


def take(numbers: Iterator[int], count: int) -> list[int]:
    """The next numbers.

    >>> take(iter([1, 2, 3]), 2)
    [1, 2]
    """
    return [next(numbers) for _ in range(count)]


def labels_of(task: Task) -> list[list[int]] | None:
    """How many samples of each class each client has; None where labels are not classes."""
    labels = [y for _, y in task.clients]
    if any(y.is_floating_point() or y.dim() != 1 for y in labels):
        return None
    together = torch.cat(labels).cpu()
    sizes = torch.tensor([len(y) for y in labels])
    classes = int(together.max()) + 1
    if int(together.min()) < 0 or classes > MOST_CLASSES:
        return None
    owner = torch.arange(len(labels)).repeat_interleave(sizes)
    counts = torch.bincount(owner * classes + together, minlength=len(labels) * classes)
    found: list[list[int]] = counts.view(len(labels), classes).tolist()
    return found

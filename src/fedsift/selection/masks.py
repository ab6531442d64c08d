"""The sparse masks of the paper and of related work.

A mask is a boolean tensor ``(clients, d)``; a client sends the coordinates where it is True.
Every top-k mask has exactly k ones per client. Ties go to the lower index.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedsift.selection.backend import can_use_triton
from fedsift.selection.cpu import top_k_mask
from fedsift.vector import Layout, State

_MAX_SORTED = 1 << 22
"""Up to this many numbers, a GPU sorts them faster than it synchronizes with the host."""


def num_kept(density: float, d: int) -> int:
    """Return the number of coordinates kept at density α: k = max(1, round(α d)).

    >>> num_kept(0.05, 21_840), num_kept(1e-9, 10)
    (1092, 1)
    """
    if not 0 < density <= 1:
        raise ValueError(f"density must be in (0, 1], got {density}")
    return max(1, round(density * d))


def top_k(x: Tensor, k: int) -> Tensor:
    """Select the k coordinates of largest magnitude per client: the mask 1_Topk(x).

    Ties go to the lower index. NaN raises ``ValueError``, except on a GPU.

    >>> top_k(torch.tensor([[3.0, -5.0, 5.0, 0.0]]), 2).tolist()
    [[False, True, True, False]]
    """
    d = x.shape[-1]
    if not 1 <= k <= d:
        raise ValueError(f"k must be between 1 and d = {d}, got {k}")
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        rows = [top_k_mask(row, k) for row in x.abs().view(-1, d)]
        return (rows[0] if len(rows) == 1 else torch.stack(rows)).view(x.shape)
    _refuse_nan(x)
    if can_use_triton(x) and x.dtype == torch.float32:
        from fedsift.selection import gpu

        return gpu.top_k(x, k)
    select = _top_k_by_order if x.numel() <= _MAX_SORTED else _top_k_by_threshold
    return select(x.abs(), k)


def _top_k_by_order(magnitude: Tensor, k: int) -> Tensor:
    """Select the k largest of each row without synchronizing a GPU with the host.

    >>> _top_k_by_order(torch.tensor([[1.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]]), 2).tolist()
    [[False, True, True, False], [True, True, False, False]]
    """
    order = magnitude.sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros_like(magnitude, dtype=torch.bool).scatter_(-1, order[..., :k], True)


def _top_k_by_threshold(magnitude: Tensor, k: int) -> Tensor:
    """Select the k largest of each row ``(..., d)`` by their threshold, faster for large inputs.

    >>> _top_k_by_threshold(torch.tensor([[1.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]]), 2).tolist()
    [[False, True, True, False], [True, True, False, False]]
    """
    rows = magnitude.reshape(-1, magnitude.shape[-1])
    threshold = rows.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    mask = rows > threshold
    num_missing = k - mask.sum(-1)
    row, column = (rows == threshold).nonzero(as_tuple=True)  # by row, ascending
    first = torch.searchsorted(row, torch.arange(len(rows), device=row.device))
    is_kept = torch.arange(len(row), device=row.device) - first[row] < num_missing[row]
    mask[row, column] |= is_kept
    return mask.view(magnitude.shape)


def top_k_union(delta: State, k: int) -> Tensor:
    """Select the k largest of max(|ΔW|, |ΔM|, |ΔV|): Fairness-Top's mask.

    >>> x = State(w=torch.tensor([[1.0, 0.0]]), m=torch.tensor([[0.0, 2.0]]), v=torch.zeros(1, 2))
    >>> top_k_union(x, 1).tolist()
    [[False, True]]
    """
    return top_k(torch.maximum(delta.w.abs(), torch.maximum(delta.m.abs(), delta.v.abs())), k)


def top_k_separate(delta: State, k: int) -> State:
    """Select the k largest of each vector: FedAdam-Top's three masks.

    >>> x = State(w=torch.tensor([[1.0, 0.0]]), m=torch.tensor([[0.0, 2.0]]), v=torch.zeros(1, 2))
    >>> [mask.tolist() for mask in top_k_separate(x, 1)]
    [[[True, False]], [[False, True]], [[True, False]]]
    """
    return delta.map(lambda x: top_k(x, k))


def top_k_per_layer(x: Tensor, density: float, layout: Layout) -> Tensor:
    """Select the largest of each layer, with the same density in every layer.

    >>> layout = Layout.of(torch.nn.Linear(2, 2))
    >>> top_k_per_layer(torch.tensor([[9.0, 8.0, 7.0, 6.0, 0.2, 0.1]]), 0.5, layout).tolist()
    [[True, True, False, False, True, False]]
    """
    layers = [x[..., span] for span in layout.layers.values()]
    return torch.cat([top_k(part, num_kept(density, part.shape[-1])) for part in layers], dim=-1)


def top_k_per_chunk(x: Tensor, density: float, chunk: int) -> Tensor:
    """Select the largest of every ``chunk`` coordinates; the last chunk may be shorter.

    >>> top_k_per_chunk(torch.tensor([[9.0, 8.0, 7.0, 0.1, 0.2]]), 0.5, 4).tolist()
    [[True, True, False, False, True]]
    """
    whole = x.shape[-1] // chunk * chunk
    chunks = x[..., :whole].reshape(*x.shape[:-1], -1, chunk)
    parts = [part for part in (chunks, x[..., None, whole:]) if part.numel()]
    masks = [top_k(part, num_kept(density, part.shape[-1])) for part in parts]
    return torch.cat([mask.flatten(-2) for mask in masks], dim=-1)


def num_kept_per_chunk(density: float, d: int, chunk: int) -> int:
    """Return the number of coordinates that :func:`top_k_per_chunk` keeps.

    >>> num_kept_per_chunk(0.5, 6, 4)
    3
    """
    rest = d % chunk
    return d // chunk * num_kept(density, chunk) + (num_kept(density, rest) if rest else 0)


def rand_k(x: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """Select k coordinates per client uniformly at random (Rand-k).

    >>> rand_k(torch.zeros(2, 10), 3, torch.Generator().manual_seed(0)).sum(-1).tolist()
    [3, 3]
    """
    _refuse_nan(x)
    draw = torch.rand(x.shape, generator=generator, dtype=torch.float64, device=generator.device)
    return top_k(draw.to(x.device), k)


def threshold(x: Tensor, v: float) -> Tensor:
    """Select every coordinate whose magnitude exceeds v (Threshold-v).

    The number of coordinates can differ between clients.

    >>> threshold(torch.tensor([[0.5, -2.0, 1.0]]), 0.9).tolist()
    [[False, True, True]]
    """
    if not v >= 0:
        raise ValueError(f"the threshold must be at least 0, got {v}")
    _refuse_nan(x)
    return x.abs() > v


def positions(mask: Tensor, k: int | None = None) -> Tensor:
    """Return the ascending indices ``(clients, k)`` of a mask's ones.

    ``k`` is the number of ones in each row; without it, a GPU synchronizes with the host to count
    them.

    >>> positions(torch.tensor([[False, True, True]])).tolist()
    [[1, 2]]
    """
    clients, d = mask.shape
    if can_use_triton(mask) and k is not None:
        from fedsift.selection import gpu

        return gpu.positions(mask, k)
    flat = mask.reshape(-1)
    if mask.device.type == "cpu":  # NumPy is ten times faster
        ones = torch.from_numpy(np.flatnonzero(flat.numpy()))
    else:
        ones = flat.nonzero()[:, 0]
    columns = ones % d if clients > 1 else ones
    if clients > 1 and k is None:
        counts = mask.sum(-1)
        if bool((counts != counts[0]).any()):
            raise ValueError("clients keep different numbers of coordinates: pass one by one")
    return columns.view(clients, -1 if k is None else k)


def _refuse_nan(x: Tensor) -> None:
    # On a GPU this check would synchronize with the host; the engine checks once per round.
    if x.device.type == "cpu" and bool(x.isnan().any()):
        raise ValueError("cannot select coordinates of a tensor that contains NaN")

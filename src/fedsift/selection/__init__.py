"""Which coordinates are sent: sparse masks, and fast ways to find them on a CPU and on a GPU."""

from fedsift.selection.masks import (
    num_kept,
    num_kept_per_chunk,
    positions,
    rand_k,
    threshold,
    top_k,
    top_k_per_chunk,
    top_k_per_layer,
    top_k_separate,
    top_k_union,
)

__all__ = [
    "num_kept",
    "num_kept_per_chunk",
    "positions",
    "rand_k",
    "threshold",
    "top_k",
    "top_k_per_chunk",
    "top_k_per_layer",
    "top_k_separate",
    "top_k_union",
]

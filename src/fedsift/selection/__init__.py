"""Selection: which coordinates are sent.

``masks.py`` holds every rule, among them top-k, random-k and threshold masks; a new rule goes
there. ``cpu.py`` and ``gpu.py`` are fast exact top-k selections, ``triton.py`` holds the kernels of
``gpu.py``, and ``backend.py`` decides whether they can run. ``difference.py`` is the difference of
two vectors, of which often only the selected coordinates are computed.
"""

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

"""Data sets by name, and how they are dealt out to clients."""

from fedsift.data.adapters import from_dataset, from_partition, split
from fedsift.data.partition import deal, dirichlet, iid
from fedsift.data.sets import DATASETS, Dataset, load, shape_of

__all__ = [
    "DATASETS",
    "Dataset",
    "deal",
    "dirichlet",
    "from_dataset",
    "from_partition",
    "iid",
    "load",
    "shape_of",
    "split",
]

"""Data sets by name, and how they are dealt out to clients."""

from fedsift.data.adapters import from_dataset, from_partition, split
from fedsift.data.partition import deal, dirichlet, documents, iid
from fedsift.data.sets import DATASETS, Dataset, digest_of, load, shape_of
from fedsift.data.text import loss_of, sequence_cross_entropy

__all__ = [
    "DATASETS",
    "Dataset",
    "deal",
    "digest_of",
    "dirichlet",
    "documents",
    "from_dataset",
    "from_partition",
    "iid",
    "load",
    "loss_of",
    "sequence_cross_entropy",
    "shape_of",
    "split",
]

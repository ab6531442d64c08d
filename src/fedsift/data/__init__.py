"""Data sets by name, and how they are dealt out to clients."""

from fedsift.data.partition import deal, dirichlet, iid
from fedsift.data.sets import DATASETS, Dataset, load, shape_of

__all__ = ["DATASETS", "Dataset", "deal", "dirichlet", "iid", "load", "shape_of"]

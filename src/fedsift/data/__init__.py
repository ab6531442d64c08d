"""Data sets by name, and their partition among clients.

- ``datasets.py``: data sets by name
- ``partition.py``: which client has which samples
- ``conversion.py``: index arrays, torch and Hugging Face data sets as clients' tensors
- ``user_data.py``: data from the user's own function
- ``text.py``, ``authors.py``: the source code of Python's library; texts by author
- ``official_sources.py``: official files, their addresses and SHA-256 digests
- ``download.py``, ``folder.py``: how they are downloaded, and the folder they are in
- ``image_files.py``: their formats
"""

from fedsift.data.conversion import from_dataset, from_huggingface, split
from fedsift.data.datasets import (
    DATASETS,
    Dataset,
    digest_of,
    load,
    shape_of,
    with_validation_split,
)
from fedsift.data.partition import dirichlet, documents, iid, partition_indices
from fedsift.data.text import loss_of
from fedsift.errors import explain_renamed
from fedsift.task.losses import sequence_cross_entropy

__all__ = [
    "DATASETS",
    "Dataset",
    "digest_of",
    "dirichlet",
    "documents",
    "from_dataset",
    "from_huggingface",
    "iid",
    "load",
    "loss_of",
    "partition_indices",
    "sequence_cross_entropy",
    "shape_of",
    "split",
    "with_validation_split",
]

__getattr__ = explain_renamed(__name__)

"""The data: Fashion-MNIST, or digits where nothing can be downloaded, split across the clients."""

import torch
from flwr.app import UserConfig

from fedsift.data import Dataset, load, partition_indices

TensorPair = tuple[torch.Tensor, torch.Tensor]


def load_dataset(config: UserConfig) -> Dataset:
    """Return the data set of the run config."""
    return load(str(config["dataset"]))


def load_share(config: UserConfig, partition: int, partitions: int) -> TensorPair:
    """Return one client's images and labels."""
    dataset = load_dataset(config)
    shares = partition_indices(
        str(config["partition"]), dataset.labels, partitions, int(config["seed"]),
        float(config["theta"]),
    )  # fmt: skip
    rows = torch.from_numpy(shares[partition])
    x, y = dataset.train
    return x[rows], y[rows]

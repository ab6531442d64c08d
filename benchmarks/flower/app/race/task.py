"""The two tasks: digits for time to accuracy, one step of VGG-11 for bytes."""

import torch
from torch import nn

from fedsift.algorithms import find, settings_of

BATCH = 64


def make_model(name):
    torch.manual_seed(0)
    if name == "vgg11":
        from fedsift.models import build

        return build("vgg11", (3, 32, 32), seed=0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(),
        nn.Linear(512, 10),
    )  # fmt: skip


def load_share(model, partition, partitions):
    if model == "vgg11":
        draw = torch.Generator().manual_seed(partition)
        return torch.randn(2, 3, 32, 32, generator=draw), torch.tensor([0, 1])
    from fedsift import data

    x, y = data.load("digits").train
    rows = data.dirichlet(y.numpy(), clients=partitions, seed=0, theta=1.0)[partition]
    return x[rows], y[rows]


def make_algorithm(config):
    import fedsift.algorithms  # noqa: F401 (registers the methods)

    name = config["method"]
    values = {key.replace("-", "_"): value for key, value in config.items()}
    return find(name)(**{k: v for k, v in values.items() if k in settings_of(name)})

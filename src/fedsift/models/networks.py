"""The networks of the experiments, by name.

Where the paper pools after a ReLU, these pool before it: both orders give the same function and the
same gradient, as ReLU is monotonic, and this one has a quarter of the work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from fedsift.data.text import CONTEXT
from fedsift.models.factory import made_by
from fedsift.models.resnet import resnet18
from fedsift.models.transformer import char_transformer, vit_tiny
from fedsift.seeding import torch_seed


def cnn() -> nn.Module:
    """The paper's CNN for Fashion-MNIST: 28 × 28 gray images, d = 21,840.

    >>> sum(p.numel() for p in cnn().parameters())
    21840
    """
    return nn.Sequential(
        nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(),
        nn.Linear(320, 50), nn.ReLU(),
        nn.Linear(50, 10),
    )  # fmt: skip


def small_cnn() -> nn.Module:
    """The same shape for 8 × 8 gray images (digits): d = 27,430.

    >>> sum(p.numel() for p in small_cnn().parameters())
    27430
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(16, 48, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(),
        nn.Linear(192, 100), nn.ReLU(),
        nn.Linear(100, 10),
    )  # fmt: skip


VGG11 = ((64, 1), (128, 1), (256, 0), (256, 1), (512, 0), (512, 1), (512, 0), (512, 1))
"""Each convolution's channels, and whether a pool follows it."""


def vgg11() -> nn.Module:
    """VGG-11 for 32 × 32 color images, without batch norm: d = 9,750,922.

    Its weights begin as torchvision's VGG does. PyTorch's own shrink a signal in each layer, until
    the logits of two images differ by less than bfloat16 can tell: training would stand still.

    >>> sum(p.numel() for p in vgg11().parameters())
    9750922
    """
    layers: list[nn.Module] = []
    channels = 3
    for width, pooled in VGG11:
        layers += [nn.Conv2d(channels, width, 3, padding=1), *[nn.MaxPool2d(2)] * pooled, nn.ReLU()]
        channels = width
    head = [nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*layers, nn.Flatten(), *head).apply(begin_as_vgg)


@torch.no_grad()
def begin_as_vgg(layer: nn.Module) -> None:
    """He's normal weights by fan-out in convolutions, small normal ones elsewhere; no biases."""
    if isinstance(layer, nn.Conv2d):
        nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    elif isinstance(layer, nn.Linear):
        nn.init.normal_(layer.weight, std=0.01)
    if isinstance(layer, nn.Conv2d | nn.Linear) and layer.bias is not None:
        nn.init.zeros_(layer.bias)


@dataclass(frozen=True)
class Entry:
    """A model and the shape of the samples it takes."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]


MODELS: dict[str, Entry] = {
    "cnn": Entry(cnn, (1, 28, 28)),
    "small-cnn": Entry(small_cnn, (1, 8, 8)),
    "vgg11": Entry(vgg11, (3, 32, 32)),
    "resnet18": Entry(resnet18, (3, 32, 32)),
    "vit-tiny": Entry(vit_tiny, (3, 32, 32)),
    "char-transformer": Entry(char_transformer, (CONTEXT,)),
}
"""Every model by its command-line name."""


def build(
    name: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """The model of that name for samples of that shape, its weights drawn from the seed.

    The name is one of ``MODELS``, or ``package.module:factory`` for one of your own, which must
    take samples of that number format: ``torch.int64`` for codes of characters.

    >>> len(list(build("cnn", (1, 28, 28), seed=0).parameters()))
    8
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(seed, "model"))
        return made_by(name, shape, dtype) if ":" in name else _entry(name, shape).make()


def _entry(name: str, shape: tuple[int, ...]) -> Entry:
    if name not in MODELS:
        raise ValueError(
            f"unknown model {name!r}; choose one of: {', '.join(MODELS)}, "
            "or give your own as package.module:factory"
        )
    entry = MODELS[name]
    if entry.shape != shape:
        fitting = [other for other, e in MODELS.items() if e.shape == shape]
        raise ValueError(
            f"model {name!r} takes samples of shape {_times(entry.shape)}, these are "
            f"{_times(shape)}; choose one of: {', '.join(fitting) or 'none here'}, or give your "
            "own as package.module:factory"
        )
    return entry


def default_model(shape: tuple[int, ...]) -> str:
    """The first model that takes samples of that shape.

    >>> default_model((1, 8, 8))
    'small-cnn'
    """
    for name, entry in MODELS.items():
        if entry.shape == shape:
            return name
    raise ValueError(f"no model here takes samples of shape {_times(shape)}")


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))

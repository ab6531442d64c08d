"""The convolutional networks of the experiments.

The paper pools after each ReLU, these networks before it. As ReLU is monotonic, both orders give
the same function and the same gradient, but here ReLU has a quarter of the work.
"""

from __future__ import annotations

import torch
from torch import nn


def cnn() -> nn.Module:
    """Return the paper's CNN for Fashion-MNIST: 28 × 28 gray images, d = 21,840.

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
    """Return a similar CNN for the 8 × 8 gray images of digits: d = 27,430.

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
"""The channels of each convolution, and whether a pool follows it."""


def vgg11() -> nn.Module:
    """Return VGG-11 for 32 × 32 color images, without batch norm: d = 9,750,922.

    Its weights are initialized as in torchvision's VGG. PyTorch's default initialization shrinks
    the signal in each layer until the logits of two images differ by less than the precision of
    bfloat16, so training would stall.

    >>> sum(p.numel() for p in vgg11().parameters())
    9750922
    """
    layers: list[nn.Module] = []
    channels = 3
    for width, pooled in VGG11:
        layers += [nn.Conv2d(channels, width, 3, padding=1), *[nn.MaxPool2d(2)] * pooled, nn.ReLU()]
        channels = width
    head = [nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*layers, nn.Flatten(), *head).apply(initialize_as_vgg)


@torch.no_grad()
def initialize_as_vgg(layer: nn.Module) -> None:
    """Initialize convolutions by He's method (fan-out), linear layers with std 0.01."""
    if isinstance(layer, nn.Conv2d):
        nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    elif isinstance(layer, nn.Linear):
        nn.init.normal_(layer.weight, std=0.01)
    if isinstance(layer, nn.Conv2d | nn.Linear) and layer.bias is not None:
        nn.init.zeros_(layer.bias)

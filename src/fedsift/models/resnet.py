"""ResNet-18 for small images, with group norm or with batch norm.

K. He, X. Zhang, S. Ren and J. Sun, "Deep Residual Learning for Image Recognition", 2016. The
original has batch norm. Group norm has no running statistics and does not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

Norm = Callable[[int], nn.Module]
"""Makes the normalization layer for a number of channels."""
GROUPS = 32
STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))
"""The channels of each stage, and the stride of the first of its two blocks."""


class ResidualBlock(nn.Module):
    """A residual block: relu(body(x) + shortcut(x))."""

    def __init__(self, channels: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, padding=1, bias=False),
            norm(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            norm(width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, width, 1, stride, bias=False), norm(width)
            )
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(body(x) + shortcut(x))."""
        out: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return out


def resnet18() -> nn.Module:
    """Return ResNet-18 with group norm, for 32 × 32 color images: d = 11,173,962.

    >>> sum(p.numel() for p in resnet18().parameters())
    11173962
    """
    return _resnet18(partial(nn.GroupNorm, GROUPS))


def resnet18_bn() -> nn.Module:
    """Return ResNet-18 with batch norm, as in the original: 9,620 numbers of running statistics.

    >>> sum(b.numel() for b in resnet18_bn().buffers())
    9620
    """
    return _resnet18(nn.BatchNorm2d)


def _resnet18(norm: Norm) -> nn.Module:
    """Return a 3 × 3 stem, 8 residual blocks, and a linear layer on the mean over all pixels."""
    stem = [nn.Conv2d(3, 64, 3, padding=1, bias=False), norm(64), nn.ReLU()]
    blocks: list[nn.Module] = []
    channels = 64
    for width, stride in STAGES:
        blocks += [
            ResidualBlock(channels, width, stride, norm),
            ResidualBlock(width, width, 1, norm),
        ]
        channels = width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
    return nn.Sequential(*stem, *blocks, *head)

"""ResNet-18 for small images, with group norm.

The running statistics of batch norm cannot be averaged over clients; group norm has none.
"""

from __future__ import annotations

from torch import Tensor, nn

GROUPS = 32
STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))
"""The channels of each stage, and the stride of the first of its two blocks."""


class ResidualBlock(nn.Module):
    """A residual block: relu(body(x) + shortcut(x))."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, padding=1, bias=False),
            nn.GroupNorm(GROUPS, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.GroupNorm(GROUPS, width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, width, 1, stride, bias=False), nn.GroupNorm(GROUPS, width)
            )
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(body(x) + shortcut(x))."""
        out: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return out


def resnet18() -> nn.Module:
    """Return ResNet-18 for 32 × 32 color images: a 3 × 3 stem, 8 residual blocks, d = 11,173,962.

    >>> sum(p.numel() for p in resnet18().parameters())
    11173962
    """
    stem = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.GroupNorm(GROUPS, 64), nn.ReLU()]
    blocks: list[nn.Module] = []
    channels = 64
    for width, stride in STAGES:
        blocks += [ResidualBlock(channels, width, stride), ResidualBlock(width, width, 1)]
        channels = width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
    return nn.Sequential(*stem, *blocks, *head)

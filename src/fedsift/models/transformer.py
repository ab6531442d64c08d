"""A small vision Transformer (Dosovitskiy et al., 2021), in the size known as ViT-Tiny.

Attention is written out: its fused kernels give other bits from run to run on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, HEADS, BLOCKS = 192, 3, 12
PATCH = 4


class Attention(nn.Module):
    """Self-attention of several heads: softmax(q kᵀ / √width) v."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens ``(samples, tokens, width)`` to tokens that have looked at each other."""
        q, k, v = self.inputs(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = torch.softmax(q @ k.transpose(-2, -1) * q.size(-1) ** -0.5, dim=-1)
        mixed: Tensor = self.output((scores @ v).transpose(1, 2).flatten(2))
        return mixed


class Block(nn.Module):
    """A pre-norm block: attention between tokens, then a network on each token."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads))
        self.network = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Each half's correction, added to its input."""
        seen: Tensor = x + self.attention(x)
        thought: Tensor = seen + self.network(seen)
        return thought


class Tokens(nn.Module):
    """An image's patches as tokens, each with its place added."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, PATCH, stride=PATCH)
        self.place = nn.Parameter(torch.empty(patches, width))
        nn.init.trunc_normal_(self.place, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Images to tokens ``(samples, patches, width)``."""
        tokens: Tensor = self.patch(x).flatten(2).transpose(1, 2) + self.place
        return tokens


class Mean(nn.Module):
    """The mean over an image's tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """One vector a sample."""
        return x.mean(1)


def vit_tiny() -> nn.Module:
    """ViT-Tiny for 32 × 32 colour images: 64 patches of 4 × 4, 12 blocks, d = 5,362,378.

    >>> sum(p.numel() for p in vit_tiny().parameters())
    5362378
    """
    blocks = [Block(WIDTH, HEADS) for _ in range(BLOCKS)]
    head = [nn.LayerNorm(WIDTH), Mean(), nn.Linear(WIDTH, 10)]
    return nn.Sequential(Tokens((32 // PATCH) ** 2, WIDTH), *blocks, *head)

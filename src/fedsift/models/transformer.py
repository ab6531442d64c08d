"""Small Transformers: the ViT-Tiny for images (Dosovitskiy et al., 2021), and one for characters.

Attention is written out: its fused kernels give other bits from run to run on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedsift.data.text import ALPHABET, CONTEXT

WIDTH, HEADS, BLOCKS = 192, 3, 12
PATCH = 4
CHAR_WIDTH, CHAR_HEADS, CHAR_BLOCKS = 128, 4, 3


class Attention(nn.Module):
    """Self-attention of several heads: softmax(q kᵀ / √width) v.

    With a ``context`` it is causal: of so many tokens, each sees itself and those before it.
    """

    mask: Tensor | None

    def __init__(self, width: int, heads: int, context: int | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        later = None if context is None else torch.full((context, context), -torch.inf).triu(1)
        self.register_buffer("mask", later, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens ``(samples, tokens, width)`` to tokens that have looked at each other."""
        q, k, v = self.inputs(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5
        shares = torch.softmax(scores if self.mask is None else scores + self.mask, dim=-1)
        mixed: Tensor = self.output((shares @ v).transpose(1, 2).flatten(2))
        return mixed


class Block(nn.Module):
    """A pre-norm block: attention between tokens, then a network on each token."""

    def __init__(self, width: int, heads: int, context: int | None = None) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads, context))
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
        self.patch = nn.Linear(3 * PATCH**2, width)
        self.place = nn.Parameter(torch.empty(patches, width))
        nn.init.trunc_normal_(self.place, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Images to tokens ``(samples, patches, width)``."""
        pixels = nn.functional.unfold(x, PATCH, stride=PATCH).transpose(1, 2)
        tokens: Tensor = self.patch(pixels) + self.place
        return tokens


class Mean(nn.Module):
    """The mean over an image's tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """One vector a sample."""
        return x.mean(1)


def vit_tiny() -> nn.Module:
    """ViT-Tiny for 32 × 32 color images: 64 patches of 4 × 4, 12 blocks, d = 5,362,378.

    >>> sum(p.numel() for p in vit_tiny().parameters())
    5362378
    """
    blocks = [Block(WIDTH, HEADS) for _ in range(BLOCKS)]
    head = [nn.LayerNorm(WIDTH), Mean(), nn.Linear(WIDTH, 10)]
    return nn.Sequential(Tokens((32 // PATCH) ** 2, WIDTH), *blocks, *head)


class Characters(nn.Module):
    """A text's characters as tokens, each with its place added."""

    def __init__(self, characters: int, context: int, width: int) -> None:
        super().__init__()
        self.character = nn.Embedding(characters, width)
        self.place = nn.Parameter(torch.empty(context, width))
        # As large as what the blocks add: smaller, what a token is would be drowned at first.
        nn.init.normal_(self.character.weight, std=0.3)
        nn.init.normal_(self.place, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Codes ``(samples, context)`` to tokens ``(samples, context, width)``."""
        tokens: Tensor = self.character(x) + self.place
        return tokens


def char_transformer() -> nn.Module:
    """A causal Transformer that foretells each next character: 3 blocks, d = 636,128.

    >>> sum(p.numel() for p in char_transformer().parameters())
    636128
    """
    width, letters = CHAR_WIDTH, len(ALPHABET)
    blocks = [Block(width, CHAR_HEADS, CONTEXT) for _ in range(CHAR_BLOCKS)]
    head = [nn.LayerNorm(width), nn.Linear(width, letters)]
    return nn.Sequential(Characters(letters, CONTEXT, width), *blocks, *head)

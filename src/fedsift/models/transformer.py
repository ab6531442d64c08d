"""Small Transformers: ViT-Tiny for images (Dosovitskiy et al., 2021), and one for characters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from fedsift.data.text import ALPHABET, CONTEXT

WIDTH, HEADS, BLOCKS = 192, 3, 12
PATCH = 4
CHAR_WIDTH, CHAR_HEADS, CHAR_BLOCKS = 128, 4, 3


class Attention(nn.Module):
    """Multi-head self-attention: softmax(q kᵀ / √width) v.

    If it is causal, a token attends to itself and to earlier ones.
    """

    def __init__(self, width: int, heads: int, is_causal: bool = False) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens ``(samples, tokens, width)`` to tokens of the same shape."""
        q, k, v = self.inputs(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        heads = scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        mixed: Tensor = self.output(heads.transpose(1, 2).flatten(2))
        return mixed


class TransformerBlock(nn.Module):
    """A pre-norm block: attention between tokens, then an MLP on each token."""

    def __init__(self, width: int, heads: int, is_causal: bool = False) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads, is_causal))
        self.network = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention and the MLP, each with a residual connection."""
        x = x + self.attention(x)
        out: Tensor = x + self.network(x)
        return out


class PatchEmbedding(nn.Module):
    """Embedding of the patches of an image, with learned positions."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.patch = nn.Linear(3 * PATCH**2, width)
        self.place = nn.Parameter(torch.empty(patches, width))
        nn.init.trunc_normal_(self.place, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Map images to tokens ``(samples, patches, width)``."""
        samples, channels, height, width = x.shape
        grid = x.view(samples, channels, height // PATCH, PATCH, width // PATCH, PATCH)
        pixels = grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        tokens: Tensor = self.patch(pixels) + self.place
        return tokens


class TokenMean(nn.Module):
    """The mean over the tokens of a sample."""

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens to one vector per sample."""
        return x.mean(1)


def vit_tiny() -> nn.Module:
    """Return ViT-Tiny for 32 × 32 color images: 64 patches of 4 × 4, 12 blocks, d = 5,362,378.

    >>> sum(p.numel() for p in vit_tiny().parameters())
    5362378
    """
    blocks = [TransformerBlock(WIDTH, HEADS) for _ in range(BLOCKS)]
    head = [nn.LayerNorm(WIDTH), TokenMean(), nn.Linear(WIDTH, 10)]
    return nn.Sequential(PatchEmbedding((32 // PATCH) ** 2, WIDTH), *blocks, *head)


class CharacterEmbedding(nn.Module):
    """Embedding of the characters of a text, with learned positions."""

    def __init__(self, characters: int, context: int, width: int) -> None:
        super().__init__()
        self.character = nn.Embedding(characters, width)
        self.place = nn.Parameter(torch.empty(context, width))
        # As large as the output of the blocks, which would hide smaller embeddings at first.
        nn.init.normal_(self.character.weight, std=0.3)
        nn.init.normal_(self.place, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Map codes ``(samples, context)`` to tokens ``(samples, context, width)``."""
        tokens: Tensor = self.character(x) + self.place
        return tokens


def char_transformer() -> nn.Module:
    """Return a causal Transformer that predicts the next character: 3 blocks, d = 636,128.

    >>> sum(p.numel() for p in char_transformer().parameters())
    636128
    """
    width, characters = CHAR_WIDTH, len(ALPHABET)
    blocks = [TransformerBlock(width, CHAR_HEADS, is_causal=True) for _ in range(CHAR_BLOCKS)]
    head = [nn.LayerNorm(width), nn.Linear(width, characters)]
    return nn.Sequential(CharacterEmbedding(characters, CONTEXT, width), *blocks, *head)

"""The models that ``fedsift bench`` times, and the work of their clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedsift.data.text import ALPHABET, CONTEXT, loss_of
from fedsift.models import MODELS, build
from fedsift.task import Loss
from fedsift.task.losses import next_token_loss
from fedsift.task.samples import TensorPair

CLIENTS = 20
LORA = "smollm2-135m-lora"
"""LoRA of rank 16 on a random Llama with the sizes of SmolLM2-135M."""
SMOLLM2: Mapping[str, Any] = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
}  # fmt: skip


@dataclass(frozen=True)
class RoundWork:
    """What each client does in a round, and the number of test samples."""

    steps: int = 30
    batch: int = 64
    tested: int = 10_000

    @property
    def text(self) -> str:
        """The work of all clients in words.

        >>> RoundWork().text
        '20 clients × 30 steps × 64 samples'
        """
        return f"{CLIENTS} clients × {self.steps} steps × {self.batch} samples"


def work_for(name: str) -> RoundWork:
    """Return the work for a model."""
    return RoundWork(steps=10, batch=8, tested=128) if name == LORA else RoundWork()


def model_for(name: str, device: str = "cpu", precision: str = "fp32") -> nn.Module:
    """Return a model with random weights."""
    if name != LORA:
        return build(name, MODELS[name].shape, seed=0)
    from fedsift.llm import LoRA, load_model

    base_dtype = torch.bfloat16 if device == "cuda" and precision == "bf16" else torch.float32
    return load_model(SMOLLM2, LoRA(rank=16, alpha=32.0), base_dtype)


def random_samples(name: str, number: int, draw: torch.Generator) -> TensorPair:
    """Draw random images of ten classes, or random characters or words and their successors."""
    shape = (CONTEXT,) if name == LORA else MODELS[name].shape
    if len(shape) == 1:
        words = SMOLLM2["vocab_size"] if name == LORA else len(ALPHABET)
        text = torch.randint(0, words, (number, 1 + shape[0]), generator=draw)
        return text[:, :-1], text[:, 1:]
    y = torch.randint(0, 10, (number,), generator=draw)
    return torch.randn(number, *shape, generator=draw), y


def loss_for(name: str, labels: torch.Tensor) -> Loss:
    """Return the loss for a model."""
    return next_token_loss if name == LORA else loss_of(labels)

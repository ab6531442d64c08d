"""All models by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from fedsift.data.text import CONTEXT
from fedsift.models.convnets import cnn, small_cnn, vgg11
from fedsift.models.resnet import resnet18, resnet18_bn
from fedsift.models.transformer import char_transformer, vit_tiny
from fedsift.models.user_factory import build_from_factory
from fedsift.seeding import torch_seed
from fedsift.task.user_code import is_user_code


@dataclass(frozen=True)
class ModelEntry:
    """A function that builds a model, and the shape of its samples."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]


MODELS: dict[str, ModelEntry] = {
    "cnn": ModelEntry(cnn, (1, 28, 28)),
    "small-cnn": ModelEntry(small_cnn, (1, 8, 8)),
    "vgg11": ModelEntry(vgg11, (3, 32, 32)),
    "resnet18": ModelEntry(resnet18, (3, 32, 32)),
    "resnet18-bn": ModelEntry(resnet18_bn, (3, 32, 32)),
    "vit-tiny": ModelEntry(vit_tiny, (3, 32, 32)),
    "char-transformer": ModelEntry(char_transformer, (CONTEXT,)),
}
"""All models by their command-line names."""


def build(
    name: str, shape: tuple[int, ...] | None, seed: int, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Build the model with this name for samples of this shape; the seed determines its weights.

    The name is one of ``MODELS``, or ``package.module:factory`` for your own model. It must accept
    samples of the data type: ``torch.int64`` for character codes. Without a shape, the samples are
    dicts or tuples of tensors, which only your own models take.

    >>> len(list(build("cnn", (1, 28, 28), seed=0).parameters()))
    8
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(seed, "model"))
        if is_user_code(name):
            return build_from_factory(name, shape, dtype)
        return _entry(name, shape).make()


def _entry(name: str, shape: tuple[int, ...] | None) -> ModelEntry:
    if name not in MODELS:
        raise ValueError(
            f"unknown model {name!r}; choose one of: {', '.join(MODELS)}, "
            "or give your own as package.module:factory"
        )
    entry = MODELS[name]
    if shape is None:
        raise ValueError(f"model {name!r} takes one tensor, but x is a dict or tuple of tensors")
    if entry.shape != shape:
        fitting = [other for other, e in MODELS.items() if e.shape == shape]
        others = f"choose one of: {', '.join(fitting)}, or" if fitting else "no other model fits;"
        raise ValueError(
            f"model {name!r} takes samples of shape {_times(entry.shape)}, but the data has shape "
            f"{_times(shape)}; {others} give your own as package.module:factory"
        )
    return entry


def default_model(shape: tuple[int, ...]) -> str:
    """Return the first model that takes samples of this shape.

    >>> default_model((1, 8, 8))
    'small-cnn'
    """
    for name, entry in MODELS.items():
        if entry.shape == shape:
            return name
    raise ValueError(f"no built-in model takes samples of shape {_times(shape)}")


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))

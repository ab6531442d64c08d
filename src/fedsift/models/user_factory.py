"""User-defined models, given as ``package.module:factory``."""

from __future__ import annotations

import torch
from torch import nn

from fedsift.task.user_code import import_function


def build_from_factory(name: str, shape: tuple[int, ...] | None, dtype: torch.dtype) -> nn.Module:
    """Call the factory, and check that its model takes samples of this shape and data type.

    Without a shape, the samples are dicts or tuples, and nothing is checked.
    """
    try:
        model = import_function("model", name)()
        if not isinstance(model, nn.Module):
            raise TypeError(f"got {type(model).__name__}, not torch.nn.Module")
        if shape is not None:
            with torch.no_grad():
                model.eval()(torch.zeros(2, *shape, dtype=dtype))
    except ValueError:
        raise
    except Exception as problem:
        size = "x".join(map(str, shape or ()))
        raise ValueError(f"model {name!r} fails on samples of shape {size}: {problem}") from None
    return model.train()

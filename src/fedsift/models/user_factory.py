"""User-defined models, given as ``package.module:factory``."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable

import torch
from torch import nn


def import_factory(name: str) -> Callable[[], nn.Module]:
    """Import the function with this name; the current directory is searched first.

    >>> import_factory("fedsift.models.convnets:cnn")().__class__.__name__
    'Sequential'
    >>> import_factory("no_such_module:cnn")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: cannot import model 'no_such_module:cnn': No module named 'no_such_module'; ...
    """
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Callable[[], nn.Module] = getattr(importlib.import_module(module), function)
    except Exception as problem:  # the user's module may raise anything
        raise ValueError(
            f"cannot import model {name!r}: {problem}; give package.module:factory, where the "
            "package is installed or in the current directory"
        ) from None
    return found


def build_from_factory(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> nn.Module:
    """Call the factory, and check that its model takes samples of this shape and data type."""
    try:
        model = import_factory(name)()
        if not isinstance(model, nn.Module):
            raise TypeError(f"got {type(model).__name__}, not torch.nn.Module")
        with torch.no_grad():
            model.eval()(torch.zeros(2, *shape, dtype=dtype))
    except ValueError:
        raise
    except Exception as problem:
        size = "x".join(map(str, shape))
        raise ValueError(f"model {name!r} fails on samples of shape {size}: {problem}") from None
    return model.train()

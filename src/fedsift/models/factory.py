"""A model of the user's own, named as ``package.module:factory``."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable

import torch
from torch import nn


def factory_of(name: str) -> Callable[[], nn.Module]:
    """The function that a name points at; the current directory is searched first.

    >>> factory_of("fedsift.models.networks:cnn")().__class__.__name__
    'Sequential'
    >>> factory_of("no_such_module:cnn")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: cannot import model 'no_such_module:cnn': No module named 'no_such_module'; ...
    """
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Callable[[], nn.Module] = getattr(importlib.import_module(module), function)
    except Exception as problem:  # the module is the user's: anything may happen in it
        raise ValueError(
            f"cannot import model {name!r}: {problem}; give package.module:factory, installed or "
            "in the current directory"
        ) from None
    return found


def made_by(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> nn.Module:
    """Call the factory, and see that its model takes samples of that shape and number format."""
    try:
        model = factory_of(name)()
        if not isinstance(model, nn.Module):
            raise TypeError(f"it gave a {type(model).__name__}, not a torch.nn.Module")
        with torch.no_grad():
            model.eval()(torch.zeros(2, *shape, dtype=dtype))
    except ValueError:
        raise
    except Exception as problem:
        size = "x".join(map(str, shape))
        raise ValueError(f"model {name!r} fails on samples of shape {size}: {problem}") from None
    return model.train()

"""Functions of the user's own modules, given as ``package.module:function``."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

LANGUAGE_MODEL, TEXT_FOLDER = "llm:", "folder:"
"""The prefixes of a language model and of a folder with texts, which are paths and not code."""


def is_user_code(name: str) -> bool:
    """Whether a name is that of a user's own function, and not of something built in.

    >>> [is_user_code(name) for name in ("my_module:make", "cnn", "llm:smollm2-135m")]
    [True, False, False]
    """
    return ":" in name and not name.startswith((LANGUAGE_MODEL, TEXT_FOLDER))


def import_function(kind: str, name: str) -> Callable[..., Any]:
    """Import the function with this name; the current directory is searched first.

    ``kind`` says in errors what the function is for: a model, data or an algorithm.

    >>> import_function("model", "fedsift.seeding:stream").__name__
    'stream'
    >>> import_function("model", "no_such_module:cnn")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: cannot import model 'no_such_module:cnn': No module named 'no_such_module'; ...
    """
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
        if not callable(found):
            raise TypeError(f"{function} is not a function")
    except Exception as problem:  # the user's module may raise anything
        raise ValueError(
            f"cannot import {kind} {name!r}: {problem}; give package.module:function, where the "
            "package is installed or in the current directory"
        ) from None
    return found  # type: ignore[no-any-return]

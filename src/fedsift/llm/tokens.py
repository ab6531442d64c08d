"""Tokenizers: the model's own, and characters for the tiny model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsift.data.text import encode_characters
from fedsift.errors import require_packages
from fedsift.llm.models import TINY, load_quietly, model_source

Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class Tokenizer:
    """How texts become tokens. ``end`` is the token between two texts; None if there is none."""

    encode: Callable[[str], Tokens]
    end: int | None = None


CHARACTERS = Tokenizer(encode_characters)
"""Printable ASCII characters and the line feed; others become question marks."""


def load_tokenizer(name: str = TINY) -> Tokenizer:
    """Load the tokenizer of a language model, named as in :func:`~fedsift.llm.load_model`.

    >>> load_tokenizer("tiny").encode("ab").tolist()
    [66, 67]
    """
    if name == TINY:
        return CHARACTERS
    require_packages("language models", "transformers", extra="llm")
    import transformers

    found = load_quietly(transformers.AutoTokenizer, model_source(name))

    def encode(text: str) -> Tokens:
        ids = found(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray(ids, np.int64)

    return Tokenizer(encode, found.eos_token_id)

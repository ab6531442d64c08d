"""The tokens of each client, cut into blocks for training, validation and testing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from fedsift.data.authors import Documents, read_authors
from fedsift.errors import ConfigError
from fedsift.llm.tokens import Tokenizer, Tokens
from fedsift.task.samples import TensorPair

BLOCK_LENGTH = 128
TEST_SHARE = 0.1
"""The share of each client's text, at its end, that is held out for testing."""
MAX_TEST_BLOCKS = 32
"""A client has at most this many blocks for testing."""


@dataclass(frozen=True)
class TokenStreams:
    """The text of each client as one array of tokens, from the longest to the shortest."""

    names: tuple[str, ...]
    tokens: tuple[Tokens, ...]

    def save(self, path: str | Path) -> None:
        """Write the tokens to a safetensors file, which :meth:`load` reads without a tokenizer."""
        largest = max(int(x.max(initial=0)) for x in self.tokens)
        kind = np.uint16 if largest < 1 << 16 else np.int32
        tensors = {f"{n:05d}": x.astype(kind) for n, x in enumerate(self.tokens)}
        save_file(tensors, path, {"names": json.dumps(self.names)})

    @classmethod
    def load(cls, path: str | Path) -> TokenStreams:
        """Read the file that :meth:`save` wrote."""
        try:
            with safe_open(path, "np") as file:
                names = tuple(json.loads((file.metadata() or {})["names"]))
                tokens = [file.get_tensor(f"{n:05d}").astype(np.int64) for n in range(len(names))]
        except (OSError, SafetensorError, KeyError, ValueError) as problem:
            raise ConfigError(f"cannot read the tokens in {path}: {problem}") from None
        return cls(names, tuple(tokens))

    def split(
        self,
        clients: int | None = None,
        block_length: int = BLOCK_LENGTH,
        validation: int = 0,
    ) -> TextClients:
        """Cut the tokens of the clients with the longest texts into blocks.

        The last blocks of each client, a tenth but at most 32, are its test data. ``validation`` is
        the number of blocks per client before them that are held out from training as well. Without
        a number of clients, these are all whose text is long enough.
        """
        if block_length < 1:
            raise ConfigError(f"block-length must be at least 1, got {block_length}")
        chosen = list(zip(self.names, self.tokens, strict=True))[:clients]
        if clients is None:
            least = (2 + validation) * block_length
            chosen = [(name, x) for name, x in chosen if len(x) > least]
        if not chosen and clients is None:
            raise ConfigError(
                f"no text has more than {least} tokens: choose a smaller block-length than "
                f"{block_length}"
            )
        if clients is not None and not 1 <= clients <= len(self.names):
            raise ConfigError(
                f"clients must be between 1 and {len(self.names)}, the number of authors, "
                f"got {clients}"
            )
        return TextClients(
            tuple(name for name, _ in chosen),
            tuple(parts_of(name, blocks(x, block_length), validation) for name, x in chosen),
        )


@dataclass(frozen=True)
class ClientText:
    """The blocks of one client for training, validation and testing, each with the next tokens."""

    train: TensorPair
    validation: TensorPair
    test: TensorPair


@dataclass(frozen=True)
class TextClients:
    """The blocks of each client, in the form that :func:`fedsift.simulate` takes."""

    names: tuple[str, ...]
    parts: tuple[ClientText, ...]

    @property
    def clients(self) -> list[TensorPair]:
        """The training data of each client."""
        return [part.train for part in self.parts]

    @property
    def client_tests(self) -> list[TensorPair]:
        """The test data of each client."""
        return [part.test for part in self.parts]

    @property
    def test(self) -> TensorPair:
        """The test data of all clients together."""
        return joined(self.client_tests)

    @property
    def validation(self) -> TensorPair:
        """The validation data of all clients together."""
        return joined([part.validation for part in self.parts])


def load_clients(
    dataset: str,
    tokenizer: Tokenizer,
    clients: int | None = None,
    block_length: int = BLOCK_LENGTH,
    validation: int = 0,
) -> TextClients:
    """Read a text by author, one client per author, and cut it into blocks of tokens.

    ``dataset`` is ``"sotu"``, ``"shakespeare"`` or ``"folder:PATH"``. With a number of clients,
    these are the authors with the longest texts. :meth:`TokenStreams.split` describes the rest.
    """
    streams = tokenize(read_authors(dataset), tokenizer, clients)
    return streams.split(clients, block_length, validation)


def tokenize(
    documents: Documents, tokenizer: Tokenizer, clients: int | None = None
) -> TokenStreams:
    """Turn the texts of each author into one array of tokens; the longest texts come first.

    >>> from fedsift.llm.tokens import CHARACTERS
    >>> tokenize({"Ann": ("a",), "Bob": ("bc", "d")}, CHARACTERS).names
    ('Bob', 'Ann')
    """
    by_length = sorted(documents, key=lambda name: (-sum(map(len, documents[name])), name))
    names = tuple(by_length[:clients])
    return TokenStreams(names, tuple(stream_of(documents[name], tokenizer) for name in names))


def stream_of(texts: Iterable[str], tokenizer: Tokenizer) -> Tokens:
    """Return the tokens of texts one after another, with the token for the end after each."""
    end = [] if tokenizer.end is None else [np.array([tokenizer.end], np.int64)]
    return np.concatenate([piece for text in texts for piece in (tokenizer.encode(text), *end)])


def blocks(tokens: Tokens, length: int) -> TensorPair:
    """Cut tokens into consecutive blocks; return them, and the token that follows each token.

    >>> x, y = blocks(np.arange(6), 2)
    >>> x.tolist(), y.tolist()
    ([[0, 1], [2, 3]], [[1, 2], [3, 4]])
    """
    end = max(0, len(tokens) - 1) // length * length
    x, y = tokens[:end].reshape(-1, length), tokens[1 : end + 1].reshape(-1, length)
    return torch.from_numpy(x.copy()), torch.from_numpy(y.copy())


def parts_of(name: str, found: TensorPair, validation: int) -> ClientText:
    """Split the blocks of a client, with those for testing at the end."""
    x, y = found
    tested = min(MAX_TEST_BLOCKS, max(1, round(TEST_SHARE * len(x))))
    train = len(x) - tested - validation
    if train < 1:
        raise ConfigError(
            f"the text of {name!r} has {len(x)} blocks, too few to train and test on: choose fewer "
            "clients or a smaller block-length"
        )
    cuts = [slice(*pair) for pair in pairwise((0, train, train + validation, len(x)))]
    return ClientText(*((x[cut], y[cut]) for cut in cuts))


def joined(pairs: Sequence[TensorPair]) -> TensorPair:
    """Return the samples of all pairs, one after another."""
    x, y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    return x, y


def document_numbers(clients: Sequence[TensorPair]) -> Tensor:
    """Return the number of the author of each sample of all clients."""
    sizes = torch.tensor([len(x) for x, _ in clients])
    return torch.arange(len(clients)).repeat_interleave(sizes)

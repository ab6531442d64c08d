"""Text data: the source code of Python's standard library, which needs no download.

A document is the source of a public module. The modules and the number of characters from each are
fixed, but their content differs between versions of Python: :func:`stdlib_digest` identifies it.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedsift.task import Loss
from fedsift.task.losses import sequence_cross_entropy
from fedsift.task.samples import TensorPair

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
"""A character's code is its position in this string; other characters become question marks."""
CONTEXT = 128
"""Characters per sample."""
MIN_LENGTH, MAX_LENGTH = 4_000, 40_000
"""Characters: shorter documents are skipped, longer ones are truncated."""
HELD_OUT = 10
"""One document out of this many is held out for testing."""
MAX_TEST_SAMPLES = 500
"""Samples in the test set, spread over all of its documents."""
MIN_DOCUMENTS = 2 * HELD_OUT
"""With fewer documents, the sources of the standard library are considered missing."""
PACKAGES = (
    "asyncio", "collections", "concurrent", "email", "html", "http", "importlib", "json", "logging",
    "multiprocessing", "unittest", "urllib", "wsgiref", "xml", "xmlrpc",
)  # fmt: skip
"""Packages that every installation has; some systems ship other packages separately."""


@dataclass(frozen=True)
class Document:
    """The path of a module in the standard library, and its source code."""

    name: str
    text: str


@dataclass(frozen=True)
class TextSamples:
    """Samples ``(n, CONTEXT)`` with the next characters, and each training sample's document."""

    train: TensorPair
    test: TensorPair
    documents: Tensor


@cache
def stdlib_documents() -> tuple[Document, ...]:
    """Return the documents of the running Python, sorted by name.

    >>> documents = stdlib_documents()
    >>> len(documents) >= MIN_DOCUMENTS, max(len(x.text) for x in documents) <= MAX_LENGTH
    (True, True)
    """
    folder = Path(sysconfig.get_path("stdlib"))
    found = tuple(documents_in(folder))
    if len(found) < MIN_DOCUMENTS:
        raise ValueError(
            f"the sources of Python's standard library are not in {folder}; use a Python that "
            "includes them, such as those of python.org, Debian and conda"
        )
    return found


def documents_in(folder: Path) -> Iterator[Document]:
    """Yield the public modules of a folder and of its :data:`PACKAGES`."""
    paths = [*folder.glob("*.py"), *(p for name in PACKAGES for p in (folder / name).rglob("*.py"))]
    for path in sorted(paths, key=lambda path: path.relative_to(folder).as_posix()):
        parts = path.relative_to(folder).with_suffix("").parts
        if parts[0] not in sys.stdlib_module_names or not all(map(is_public, parts)):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if len(text) >= MIN_LENGTH:
            yield Document("/".join(parts), text[:MAX_LENGTH])


def is_public(name: str) -> bool:
    """Return whether a module or package is neither private nor a test.

    >>> [is_public(name) for name in ("parser", "_parser", "test", "testmock")]
    [True, False, False, False]
    """
    return not name.startswith(("_", "test"))


def stdlib_digest() -> str:
    """Return the SHA-256 of the names and texts of all documents."""
    return digest_of_texts((document.name, document.text) for document in stdlib_documents())


def digest_of_texts(documents: Iterable[Sequence[str]]) -> str:
    """Return the SHA-256 of documents, each its name and its texts.

    >>> digest_of_texts([("name", "a text")])[:8]
    'b08c5f59'
    """
    sha256 = hashlib.sha256()
    for parts in documents:
        for part in parts:
            sha256.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return sha256.hexdigest()


def read_stdlib() -> TextSamples:
    """Return the samples of the documents; every tenth document is held out for testing."""
    documents = stdlib_documents()
    held = documents[HELD_OUT - 1 :: HELD_OUT]
    rest = [document for document in documents if document not in held]
    x, y, numbers = samples_of(rest)
    x_test, y_test, _ = samples_of(held)
    step = -(-len(x_test) // MAX_TEST_SAMPLES)
    return TextSamples((x, y), (x_test[::step], y_test[::step]), numbers)


def samples_of(documents: Sequence[Document]) -> tuple[Tensor, Tensor, Tensor]:
    """Return all samples, the characters that follow, and the document number of each sample.

    >>> x, y, numbers = samples_of([Document("a", "ab" * 200), Document("b", "c" * 129)])
    >>> x.shape, numbers.tolist(), torch.equal(x[0, 1:], y[0, :-1])
    (torch.Size([4, 128]), [0, 0, 0, 1], True)
    """
    pieces = [windows(encode_characters(document.text)) for document in documents]
    x, y = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*pieces, strict=True))
    sizes = torch.tensor([len(piece[0]) for piece in pieces])
    return x, y, torch.arange(len(documents)).repeat_interleave(sizes)


def encode_characters(text: str) -> NDArray[np.int64]:
    r"""Return the position of each character in the alphabet.

    >>> encode_characters("\n !é").tolist() == [0, 1, 2, ALPHABET.index("?")]
    True
    """
    table = np.full(128, ALPHABET.index("?"))
    table[[ord(character) for character in ALPHABET]] = np.arange(len(ALPHABET))
    codes: NDArray[np.int64] = table[np.frombuffer(text.encode("ascii", "replace"), np.uint8)]
    return codes


def windows(codes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split codes into consecutive samples; return them and the same shifted by one character."""
    end = (len(codes) - 1) // CONTEXT * CONTEXT
    return codes[:end].reshape(-1, CONTEXT), codes[1 : end + 1].reshape(-1, CONTEXT)


def loss_of(targets: Tensor) -> Loss:
    """Return the cross-entropy for targets of one class per sample or one per position.

    >>> loss_of(torch.zeros(5, dtype=torch.int64)).__name__
    'cross_entropy'
    """
    return cross_entropy if targets.dim() == 1 else sequence_cross_entropy

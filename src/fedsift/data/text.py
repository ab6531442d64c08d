"""The characters of Python's own standard library: a text that is wherever Python is.

A document is a public module's source. Which modules are read, and how much of each, is fixed here,
but Python's versions differ in what stands in them: :func:`digest` says which text it was.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedsift.task import Data, Loss

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
"""A character's code is its place here; every other character is read as a question mark."""
CONTEXT = 128
"""Characters of a sample."""
SHORTEST, LONGEST = 4_000, 40_000
"""Characters: shorter documents are left out, longer ones are cut."""
HELD_OUT = 10
"""One document in so many is for the test."""
MOST_TESTED = 500
"""Samples of the test set, spread over all of its documents."""
FEWEST = 2 * HELD_OUT
"""Documents without which there is no text to speak of."""
PACKAGES = (
    "asyncio", "collections", "concurrent", "email", "html", "http", "importlib", "json", "logging",
    "multiprocessing", "unittest", "urllib", "wsgiref", "xml", "xmlrpc",
)  # fmt: skip
"""Packages that every installation has; some systems ship others, or tests, separately."""


@dataclass(frozen=True)
class Document:
    """A module's path below the standard library's folder, and its text."""

    name: str
    text: str


@dataclass(frozen=True)
class Text:
    """Samples ``(n, CONTEXT)`` and what follows each character; and each sample's document."""

    train: Data
    test: Data
    documents: Tensor


@cache
def library() -> tuple[Document, ...]:
    """The documents of this Python, in the order of their names.

    >>> len(library()) >= FEWEST, max(len(document.text) for document in library()) <= LONGEST
    (True, True)
    """
    folder = Path(sysconfig.get_path("stdlib"))
    found = tuple(documents_in(folder))
    if len(found) < FEWEST:
        raise ValueError(
            f"the sources of Python's standard library are not in {folder}: use a Python that has "
            "them, as those of python.org, Debian and conda do"
        )
    return found


def documents_in(folder: Path) -> Iterator[Document]:
    """The public modules of a folder and of its :data:`PACKAGES`."""
    paths = [*folder.glob("*.py"), *(p for name in PACKAGES for p in (folder / name).rglob("*.py"))]
    for path in sorted(paths, key=lambda path: path.relative_to(folder).as_posix()):
        parts = path.relative_to(folder).with_suffix("").parts
        if parts[0] not in sys.stdlib_module_names or not all(map(is_public, parts)):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if len(text) >= SHORTEST:
            yield Document("/".join(parts), text[:LONGEST])


def is_public(name: str) -> bool:
    """Whether a module or package is neither private nor a test.

    >>> [is_public(name) for name in ("parser", "_parser", "test", "testmock")]
    [True, False, False, False]
    """
    return not name.startswith(("_", "test"))


def digest() -> str:
    """The SHA-256 of all documents, names and texts: the same text, the same digest.

    >>> len(digest())
    64
    """
    sha256 = hashlib.sha256()
    for document in library():
        for part in (document.name, document.text):
            sha256.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return sha256.hexdigest()


def read_stdlib() -> Text:
    """The samples of this Python's documents; every tenth document is held out for the test."""
    documents = library()
    held = documents[HELD_OUT - 1 :: HELD_OUT]
    kept = [document for document in documents if document not in held]
    x, y, numbers = samples_of(kept)
    x_test, y_test, _ = samples_of(held)
    step = -(-len(x_test) // MOST_TESTED)
    return Text((x, y), (x_test[::step], y_test[::step]), numbers)


def samples_of(documents: Sequence[Document]) -> tuple[Tensor, Tensor, Tensor]:
    """Samples side by side, the characters that follow, and the number of each sample's document.

    >>> x, y, numbers = samples_of([Document("a", "ab" * 200), Document("b", "c" * 129)])
    >>> x.shape, numbers.tolist(), torch.equal(x[0, 1:], y[0, :-1])
    (torch.Size([4, 128]), [0, 0, 0, 1], True)
    """
    pieces = [windows(codes_of(document.text)) for document in documents]
    x, y = (torch.from_numpy(np.concatenate(each)) for each in zip(*pieces, strict=True))
    sizes = torch.tensor([len(piece[0]) for piece in pieces])
    return x, y, torch.arange(len(documents)).repeat_interleave(sizes)


def codes_of(text: str) -> NDArray[np.int64]:
    r"""Each character's place in the alphabet.

    >>> codes_of("\n !é").tolist() == [0, 1, 2, ALPHABET.index("?")]
    True
    """
    table = np.full(128, ALPHABET.index("?"))
    table[[ord(character) for character in ALPHABET]] = np.arange(len(ALPHABET))
    codes: NDArray[np.int64] = table[np.frombuffer(text.encode("ascii", "replace"), np.uint8)]
    return codes


def windows(codes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Samples that touch but do not overlap, and the same moved on by one character."""
    end = (len(codes) - 1) // CONTEXT * CONTEXT
    return codes[:end].reshape(-1, CONTEXT), codes[1 : end + 1].reshape(-1, CONTEXT)


def sequence_cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over all positions of all samples.

    ``output`` is ``(samples, positions, classes)`` and ``targets`` ``(samples, positions)``; where
    a sample has but one class, and neither has positions, it is the plain cross-entropy.

    >>> output, targets = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)
    >>> round(sequence_cross_entropy(output, targets).exp().item(), 4)
    4.0
    """
    return cross_entropy(output.flatten(0, -2), targets.flatten())


def loss_of(targets: Tensor) -> Loss:
    """The cross-entropy that fits the targets: one class a sample, or one a position.

    >>> loss_of(torch.zeros(5, dtype=torch.int64)).__name__
    'cross_entropy'
    """
    return cross_entropy if targets.dim() == 1 else sequence_cross_entropy

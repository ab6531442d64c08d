"""Integers modulo 2**b: how wide they must be, and how they are packed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedsift.codec.bit_packing import packed_size
from fedsift.privacy.secure.refusal import require

Words = npt.NDArray[np.unsignedinteger]
"""Integers modulo 2**b, in the smallest unsigned type that has b bits."""
Integers = npt.NDArray[np.int64]
MAX_BITS = 53
"""Sums of at most this many bits are exact in float64."""
_CHUNK = 8 * 2**14


def bits_for(largest: int) -> int:
    """Return b such that every whole number from -largest to largest differs modulo 2**b.

    20 clients with codes of 4 bits (-7 to 7) and equal weights need 9 bits:

    >>> bits_for(20 * 7)
    9
    """
    bits = largest.bit_length() + 1
    require(bits <= MAX_BITS, f"the sum needs {bits} bits per value; at most {MAX_BITS} are exact")
    return bits


def word_type(bits: int) -> np.dtype[np.unsignedinteger]:
    """Return the smallest unsigned type with this many bits.

    >>> word_type(9)
    dtype('uint16')
    """
    return np.dtype(f"<u{next(size for size in (1, 2, 4, 8) if 8 * size >= bits)}")


def to_words(values: Integers, bits: int) -> Words:
    """Return signed integers modulo 2**bits."""
    return values.astype(word_type(bits))


def from_words(words: Words, bits: int) -> Integers:
    """Return the integers from -2**(bits-1) to 2**(bits-1) - 1 that the words stand for.

    >>> from_words(to_words(np.array([-140, 0, 140]), 9), 9).tolist()
    [-140, 0, 140]
    """
    low: Integers = words.astype(np.int64) & (2**bits - 1)
    return low - (low >> (bits - 1) << bits)


def pack_words(words: Words, bits: int) -> bytes:
    """Pack the low bits of each word, lowest bit first.

    >>> pack_words(np.array([1, 2, 3], np.uint8), 4).hex()
    '2103'
    """
    chunks = (words[at : at + _CHUNK] for at in range(0, len(words), _CHUNK))
    return b"".join(_pack_chunk(chunk, bits) for chunk in chunks)


def _pack_chunk(words: Words, bits: int) -> bytes:
    as_bytes = np.ascontiguousarray(words).view(np.uint8).reshape(len(words), -1)
    kept = np.unpackbits(as_bytes, axis=1, count=bits, bitorder="little")
    return np.packbits(kept, bitorder="little").tobytes()


def unpack_words(payload: bytes, n: int, bits: int) -> Words:
    """Return n packed words; refuse a payload of another length."""
    expected = packed_size(n, bits)
    require(len(payload) == expected, f"masked values take {expected} bytes, got {len(payload)}")
    words = np.zeros(n, word_type(bits))
    for at in range(0, n, _CHUNK):
        part = words[at : at + _CHUNK]
        chunk = payload[at * bits // 8 : (at + _CHUNK) * bits // 8]
        flat = np.unpackbits(
            np.frombuffer(chunk, np.uint8), count=len(part) * bits, bitorder="little"
        )
        wide = np.zeros((len(part), 8 * words.itemsize), np.uint8)
        wide[:, :bits] = flat.reshape(-1, bits)
        part[:] = np.packbits(wide, axis=1, bitorder="little").view(words.dtype)[:, 0]
    return words

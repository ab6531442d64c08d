"""Codes of a few bits each, one after the other in bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedsift.codec.errors import require

Octets = npt.NDArray[np.uint8]


def bytes_for(n: int, bits: int) -> int:
    """Bytes that n codes of ``bits`` bits take."""
    return -(-n * bits // 8)


def pack_bits(codes: Octets, bits: int) -> bytes:
    """Put the low ``bits`` of each code one after the other, the lowest bit first.

    Eight codes of b bits are b bytes: they meet in one 64-bit word.
    """
    lanes = np.pad(codes, (0, -len(codes) % 8)).reshape(-1, 8)
    words = np.zeros(len(lanes), "<u8")
    for lane in range(8):
        words |= lanes[:, lane].astype(np.uint64) << np.uint64(bits * lane)
    octets = words.view(np.uint8).reshape(-1, 8)[:, :bits]
    return octets.tobytes()[: bytes_for(len(codes), bits)]


def unpack_bits(payload: bytes, n: int, bits: int) -> Octets:
    """Read n codes of ``bits`` bits; what fills up the last byte must be zero."""
    groups = -(-n // 8)
    octets = np.zeros((groups, 8), np.uint8)
    octets[:, :bits] = np.frombuffer(payload.ljust(groups * bits, b"\0"), np.uint8).reshape(
        -1, bits
    )
    words = octets.view("<u8").reshape(-1)
    codes = np.empty((groups, 8), np.uint8)
    for lane in range(8):
        codes[:, lane] = words >> np.uint64(bits * lane) & np.uint64(2**bits - 1)
    flat = codes.reshape(-1)
    require(not flat[n:].any(), "padding is not zero")
    return flat[:n]

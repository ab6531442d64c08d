"""Fixed-width bit packing: codes of 1 to 8 bits, stored back to back in bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedsift.codec.errors import require

ByteArray = npt.NDArray[np.uint8]


def packed_size(n: int, bits: int) -> int:
    """Return the number of bytes that n codes of ``bits`` bits take.

    >>> packed_size(3, 4)
    2
    """
    return -(-n * bits // 8)


def pack_bits(codes: ByteArray, bits: int) -> bytes:
    """Pack the low ``bits`` of each code, lowest bit first.

    Eight codes of b bits fill exactly b bytes, so each group of eight is built in a 64-bit word.

    >>> pack_bits(np.array([1, 2, 3], np.uint8), 4).hex()
    '2103'
    """
    groups = np.pad(codes, (0, -len(codes) % 8)).reshape(-1, 8)
    words = np.zeros(len(groups), "<u8")
    for lane in range(8):
        words |= groups[:, lane].astype(np.uint64) << np.uint64(bits * lane)
    packed = words.view(np.uint8).reshape(-1, 8)[:, :bits]
    return packed.tobytes()[: packed_size(len(codes), bits)]


def unpack_bits(payload: bytes, n: int, bits: int) -> ByteArray:
    """Unpack n codes of ``bits`` bits; raise :class:`FrameError` if the padding bits are not zero.

    >>> unpack_bits(bytes.fromhex("2103"), 3, 4).tolist()
    [1, 2, 3]
    """
    groups = -(-n // 8)
    packed = np.zeros((groups, 8), np.uint8)
    padded = np.frombuffer(payload.ljust(groups * bits, b"\0"), np.uint8)
    packed[:, :bits] = padded.reshape(-1, bits)
    words = packed.view("<u8").reshape(-1)
    codes = np.empty((groups, 8), np.uint8)
    for lane in range(8):
        codes[:, lane] = words >> np.uint64(bits * lane) & np.uint64(2**bits - 1)
    flat = codes.reshape(-1)
    require(not flat[n:].any(), "padding is not zero")
    return flat[:n]

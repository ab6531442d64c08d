"""Entropy coding of block codes: a range coder under a table of the codes in use.

The values of a sparse update use few of the possible codes: the largest coordinates have no small
levels, and nearly all of V is close to zero. Entropy coding takes about half the bytes of bit
packing.

The table has one bit per code, 1 if the code is in use, then the log-weights of these codes, four
bits each, or eight where this pays off. A single code in use has no log-weight. The bit of "minus
zero", a code that is never sent, says that the log-weights have eight bits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedsift.codec import range_coder
from fedsift.codec.bit_packing import ByteArray, packed_size
from fedsift.codec.errors import require
from fedsift.codec.native import decoder_of
from fedsift.codec.range_coder import IntArray
from fedsift.selection.backend import can_use_triton

_CHUNK = 1 << 20  # codes counted at a time: their int64 positions take eight times their memory
_LANES = 64  # counters per code: additions to one counter are serialized on a GPU


def count_codes(codes: Tensor, bits: int) -> Tensor:
    """Count each code in signed codes ``(clients, n)``; return ``(clients, 2**bits)``.

    Column ``level`` counts positive codes, column ``2**(bits - 1) + level`` negative ones.

    >>> count_codes(torch.tensor([[1, -3, 1]], dtype=torch.int8), 3).tolist()
    [[0, 2, 0, 0, 0, 0, 0, 1]]
    """
    if codes.device.type != "cpu":
        return _count_on_device(codes, bits)
    return torch.stack([_count(row, bits) for row in to_unsigned(codes, bits).numpy()])


def _count_on_device(codes: Tensor, bits: int) -> Tensor:
    """Count without synchronizing with the host, and with little memory."""
    clients, n = codes.shape
    counts = torch.zeros(clients, _LANES << bits, dtype=torch.int64, device=codes.device)
    one = torch.ones(1, 1, dtype=torch.int64, device=codes.device)
    lane = torch.arange(_LANES, device=codes.device) << bits
    width = max(_CHUNK // max(clients, 1) // _LANES, 1) * _LANES
    for start in range(0, n, width):
        chunk = codes[:, start : start + width]
        lanes = lane.repeat(-(-chunk.shape[1] // _LANES))[: chunk.shape[1]]
        index = lanes + to_unsigned(chunk, bits)
        counts.scatter_add_(1, index, one.expand_as(index))
    return counts.view(clients, _LANES, 1 << bits).sum(1)


def to_unsigned(codes: Tensor, bits: int) -> Tensor:
    """Store signed codes as the level in the low bits and the sign above it.

    >>> to_unsigned(torch.tensor([2, -2, 0], dtype=torch.int8), 4).tolist()
    [2, 10, 0]
    """
    return codes.abs().view(torch.uint8) | (codes < 0).view(torch.uint8) << bits - 1


def coded_sizes(counts: Tensor) -> Tensor:
    """Return the bytes of each client's codes from their counts ``(clients, codes)``.

    >>> coded_sizes(torch.tensor([[90, 0, 0, 0], [50, 40, 0, 10]])).tolist()
    [1, 20]
    """
    if can_use_triton(counts):
        from fedsift.codec import gpu_sizes

        return gpu_sizes.code_sizes(counts)
    return torch.minimum(_fit(counts, coarse=True)[0], _fit(counts, coarse=False)[0])


def _fit(counts: Tensor, coarse: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bytes of table and code, the log-weights, and the probabilities."""
    logs = range_coder.log_weights(counts, coarse)
    weights = range_coder.probabilities(logs)
    present = (counts > 0).sum(-1)
    table_bits = counts.shape[-1] + torch.where(present > 1, present * (4 if coarse else 8), 0)
    return (table_bits + 7) // 8 + _code_bytes(counts, weights), logs, weights


def encode_codes(raw: ByteArray, bits: int, below: int) -> bytes | None:
    """Return the table and the coded codes, or None unless they take less than ``below`` bytes.

    The length is that of :func:`coded_sizes`.

    >>> encode_codes(np.array([2, 2, 2, 2, 2], np.uint8), 4, below=3).hex()
    '0400'
    """
    counts = _count(raw, bits)
    fits = [(*_fit(counts, coarse), coarse) for coarse in (True, False)]
    size, logs, weights, coarse = min(fits, key=lambda fit: int(fit[0]))
    if int(size) >= below:
        return None
    present, model = range_coder.symbol_model(weights.numpy())
    table = _write_table(present, logs.numpy()[present], bits, coarse)
    encoder, rank = range_coder.new_encoder(), np.zeros(1 << bits, np.int32)
    rank[present] = np.arange(len(present))
    for start in range(0, len(raw) if model else 0, range_coder.CHUNK):
        encoder.encode(rank[raw[start : start + range_coder.CHUNK]], model)
    return table + range_coder.final_code(encoder, int(size) - len(table))


def decode_codes(payload: bytes, n: int, bits: int) -> ByteArray:
    """Read n codes written by :func:`encode_codes`; raise :class:`FrameError` if malformed."""
    logs, code = _read_table(payload, bits)
    weights = range_coder.probabilities(torch.from_numpy(logs))
    raw = decoder_of(code).symbols(weights.numpy(), n)
    size = int(_code_bytes(_count(raw, bits), weights))
    require(len(code) == size, "entropy: the code's length does not match its values")
    return raw


def _count(raw: ByteArray, bits: int) -> Tensor:
    counts = np.zeros(1 << bits, np.int64)
    for start in range(0, len(raw), range_coder.CHUNK):
        counts += np.bincount(raw[start : start + range_coder.CHUNK], minlength=1 << bits)
    return torch.from_numpy(counts)


def _code_bytes(counts: Tensor, weights: Tensor) -> Tensor:
    return range_coder.code_bytes(range_coder.code_bits(counts, weights))


def _write_table(present: IntArray, logs: IntArray, bits: int, coarse: bool) -> bytes:
    has_weights = len(present) > 1
    used = np.zeros(1 << bits, np.uint8)
    used[present] = 1
    used[1 << bits - 1] = has_weights and not coarse
    listed = (range_coder.to_coarse(logs) if coarse else logs).astype(np.uint8)[:, None]
    weights = np.unpackbits(listed, axis=1, count=4 if coarse else 8, bitorder="little")
    table = np.concatenate([used, weights.ravel()]) if has_weights else used
    return np.packbits(table, bitorder="little").tobytes()


def _read_table(payload: bytes, bits: int) -> tuple[IntArray, bytes]:
    """Return the log-weights of all codes, and the bytes after the table."""
    data, num_codes = np.frombuffer(payload, np.uint8), 1 << bits
    used = np.unpackbits(data, count=num_codes, bitorder="little")
    coarse, used[num_codes >> 1] = not used[num_codes >> 1], 0
    present = np.flatnonzero(used)
    width = (4 if coarse else 8) if len(present) > 1 else 0
    end = num_codes + width * len(present)
    size = packed_size(end, 1)
    require(len(present) > 0 and len(payload) >= size, "entropy: truncated, or no code in use")
    table = np.unpackbits(data[:size], bitorder="little")
    require(not table[end:].any() and (coarse or width > 0), "entropy: padding is not zero")
    logs = np.zeros(num_codes, np.int64)
    logs[present] = range_coder.MAX_LOG
    if width:
        listed = table[num_codes:end].reshape(-1, width)
        given = np.packbits(listed, axis=1, bitorder="little")[:, 0].astype(np.int64)
        require(given.min() > 0 and given.max() <= range_coder.MAX_LOG, "entropy: bad table")
        logs[present] = range_coder.from_coarse(given) if coarse else given
    return logs, payload[size:]

"""Codes of a few bits in a range coder, under a table of the codes in use.

The values of a sparse update use few of their codes: the largest coordinates have no small levels,
and of V nearly everything is near zero. So they take half of the bits that packing them would.

The table is a bit for each code, 1 if it is in use, and the log-weights of these, four bits each
or, where many values make them worth it, eight. A single code in use has no weight. The bit of
the code "minus zero", which nobody sends, says that the weights have eight bits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedsift.codec import tables
from fedsift.codec.bits import Octets, bytes_for
from fedsift.codec.errors import FrameError, require
from fedsift.codec.tables import Ints
from fedsift.selection.cpu import has_kernels

_PIECE = 1 << 20  # codes counted at a time: their places take eight times their memory
_LANES = 64  # counters for each code: a GPU adds to one counter one by one


def count(codes: Tensor, bits: int) -> Tensor:
    """How often each code ``(clients, 2**bits)`` occurs in signed codes ``(clients, n)``.

    Sign and level are one number, as in the bytes: -3 of four bits is 8 + 3.

    >>> count(torch.tensor([[1, -3, 1]], dtype=torch.int8), 3).tolist()
    [[0, 2, 0, 0, 0, 0, 0, 1]]
    """
    if codes.device.type != "cpu":
        return _scattered(codes, bits)
    return torch.stack([_count(row, bits) for row in unsigned(codes, bits).numpy()])


def _scattered(codes: Tensor, bits: int) -> Tensor:
    """The same for a GPU: it does not synchronize with the host, and needs little memory."""
    clients, n = codes.shape
    seen = torch.zeros(clients, _LANES << bits, dtype=torch.int64, device=codes.device)
    one = torch.ones(1, 1, dtype=torch.int64, device=codes.device)
    lane = torch.arange(_LANES, device=codes.device) << bits
    width = max(_PIECE // max(clients, 1) // _LANES, 1) * _LANES
    for at in range(0, n, width):
        piece = codes[:, at : at + width]
        lanes = lane.repeat(-(-piece.shape[1] // _LANES))[: piece.shape[1]]
        where = lanes + unsigned(piece, bits)
        seen.scatter_add_(1, where, one.expand_as(where))
    return seen.view(clients, _LANES, 1 << bits).sum(1)


def unsigned(codes: Tensor, bits: int) -> Tensor:
    """Signed codes as level and, above it, sign.

    >>> unsigned(torch.tensor([2, -2, 0], dtype=torch.int8), 4).tolist()
    [2, 10, 0]
    """
    return codes.abs().view(torch.uint8) | (codes < 0).view(torch.uint8) << bits - 1


def sizes(seen: Tensor) -> Tensor:
    """The bytes of each client's codes, from their counts ``(clients, codes)``.

    >>> sizes(torch.tensor([[90, 0, 0, 0], [50, 40, 0, 10]])).tolist()
    [1, 20]
    """
    if has_kernels(seen):
        from fedsift.codec import gpu_sizes

        return gpu_sizes.code_sizes(seen)
    return torch.minimum(_fit(seen, coarse=True)[0], _fit(seen, coarse=False)[0])


def _fit(seen: Tensor, coarse: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The bytes of table and code, and the codes' log-weights and weights."""
    logs = tables.log_weights(seen, coarse)
    weights = tables.weights(logs)
    present = (seen > 0).sum(-1)
    table = seen.shape[-1] + torch.where(present > 1, present * (4 if coarse else 8), 0)
    return (table + 7) // 8 + _code_bytes(seen, weights), logs, weights


def write(raw: Octets, bits: int, below: int) -> bytes | None:
    """The table and the codes, in as many bytes as :func:`sizes` says; None unless ``below``.

    >>> write(np.array([2, 2, 2, 2, 2], np.uint8), 4, below=3).hex()
    '0400'
    """
    seen = _count(raw, bits)
    fits = [(*_fit(seen, coarse), coarse) for coarse in (True, False)]
    size, logs, weights, coarse = min(fits, key=lambda fit: int(fit[0]))
    if int(size) >= below:
        return None
    present, model = tables.alphabet(weights.numpy())
    table = _write_table(present, logs.numpy()[present], bits, coarse)
    encoder, rank = tables.encoder(), np.zeros(1 << bits, np.int32)
    rank[present] = np.arange(len(present))
    for at in range(0, len(raw) if model else 0, tables.PIECE):
        encoder.encode(rank[raw[at : at + tables.PIECE]], model)
    return table + tables.finish(encoder, int(size) - len(table))


def read(payload: bytes, n: int, bits: int) -> Octets:
    """The n codes that :func:`write` has written; :class:`FrameError` for any other bytes."""
    logs, code = _read_table(payload, bits)
    weights = tables.weights(torch.from_numpy(logs))
    present, model = tables.alphabet(weights.numpy())
    raw = np.full(n, present[0], np.uint8)
    if model is not None:
        decoder, symbols = tables.decoder_of(code), present.astype(np.uint8)
        try:
            for at in range(0, n, tables.PIECE):
                some = raw[at : at + tables.PIECE]
                some[:] = symbols[decoder.decode(model, len(some))]
        except AssertionError as error:
            raise FrameError("entropy: not what an encoder writes") from error
    size = int(_code_bytes(_count(raw, bits), weights))
    require(len(code) == size, "entropy: not as long as its codes")
    return raw


def _count(raw: Octets, bits: int) -> Tensor:
    seen = np.zeros(1 << bits, np.int64)
    for at in range(0, len(raw), tables.PIECE):
        seen += np.bincount(raw[at : at + tables.PIECE], minlength=1 << bits)
    return torch.from_numpy(seen)


def _code_bytes(seen: Tensor, weights: Tensor) -> Tensor:
    return tables.code_bytes(tables.cost(seen, weights))


def _write_table(present: Ints, logs: Ints, bits: int, coarse: bool) -> bytes:
    several = len(present) > 1
    used = np.zeros(1 << bits, np.uint8)
    used[present] = 1
    used[1 << bits - 1] = several and not coarse
    listed = (tables.to_coarse(logs) if coarse else logs).astype(np.uint8)[:, None]
    weights = np.unpackbits(listed, axis=1, count=4 if coarse else 8, bitorder="little")
    table = np.concatenate([used, weights.ravel()]) if several else used
    return np.packbits(table, bitorder="little").tobytes()


def _read_table(payload: bytes, bits: int) -> tuple[Ints, bytes]:
    """The log-weights of all codes, and the bytes behind the table."""
    octets, end = np.frombuffer(payload, np.uint8), 1 << bits
    used = np.unpackbits(octets, count=end, bitorder="little")
    coarse, used[end >> 1] = not used[end >> 1], 0
    present = np.flatnonzero(used)
    width = (4 if coarse else 8) if len(present) > 1 else 0
    size = bytes_for(end + width * len(present), 1)
    require(len(present) > 0 and len(payload) >= size, "entropy: truncated, or no code in use")
    table = np.unpackbits(octets[:size], bitorder="little")
    behind = end + width * len(present)
    require(not table[behind:].any() and (coarse or width > 0), "entropy: padding is not zero")
    logs = np.zeros(end, np.int64)
    logs[present] = tables.TOP
    if width:
        listed = table[end:behind].reshape(-1, width)
        given = np.packbits(listed, axis=1, bitorder="little")[:, 0].astype(np.int64)
        require(given.min() > 0 and given.max() <= tables.TOP, "entropy: bad table")
        logs[present] = tables.from_coarse(given) if coarse else given
    return logs, payload[size:]

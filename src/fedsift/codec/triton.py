"""The sizes of entropy-coded masks and values in Triton; imported only where there is a GPU.

The arithmetic is that of ``tables``, ``gaps`` and ``sizes``, bit for bit, with one program where
these have a tensor's row: a GPU takes longer to begin a kernel than to run one of these.
"""

import triton
import triton.language as tl

from fedsift.codec import gaps, tables

TOP = tl.constexpr(tables.TOP)
COARSE_TOP = tl.constexpr(tables.COARSE_TOP)
COARSE = tl.constexpr(tables.COARSE)
LOSS = tl.constexpr(tables.LOSS)
WHOLE = tl.constexpr(1 << tables.PRECISION)
CERTAIN = tl.constexpr(tables.PRECISION << 16)
EXACT = tl.constexpr(1 << gaps.FINE)  # smaller gaps are buckets themselves
MANTISSA = tl.constexpr(52 - gaps.FINE)
EXPONENT = tl.constexpr((1022 + gaps.FINE) << gaps.FINE)
BUCKETS = tl.constexpr(gaps.BUCKETS)


@triton.jit
def gaps_kernel(indices, starts, seen, k, segments, BLOCK: tl.constexpr):
    """Count a block of one mask's gaps by segment and fine bucket; none where indices descend."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < k
    place = indices + row * k + at
    index = tl.load(place, mask=inside, other=0)
    gap = index - tl.load(place - 1, mask=inside & (at > 0), other=-1) - 1
    head = gap.to(tl.float64).to(tl.int64, bitcast=True) >> MANTISSA
    bucket = tl.where(gap < EXACT, gap, head - EXPONENT)
    cell = tl.zeros((BLOCK,), tl.int64) + row * segments
    for segment in range(1, segments):
        cell += (index >= tl.load(starts + segment)).to(tl.int64)
    one = tl.full((BLOCK,), 1, tl.int64)
    tl.atomic_add(seen + cell * BUCKETS + bucket, one, mask=inside & (gap >= 0), sem="relaxed")


@triton.jit
def mask_sizes_kernel(
    histograms, ends, low_bits, mantissa, logarithms, sizes, segments, WIDTH: tl.constexpr
):
    """One mask's size in bytes under one of the sixteen kinds of model."""
    mask = tl.program_id(0).to(tl.int64)
    kind = tl.program_id(1)
    sub_bits = kind & 3
    is_layered = (kind & 4) > 0
    coarse = (kind & 8) > 0
    place = tl.arange(0, WIDTH)
    known = place < BUCKETS
    first = tl.load(ends + sub_bits * (BUCKETS + 1) + place, mask=known, other=0)
    last = tl.load(ends + sub_bits * (BUCKETS + 1) + place + 1, mask=known, other=0)
    low = tl.load(low_bits + sub_bits * BUCKETS + place, mask=known, other=0)
    count = tl.where(is_layered, segments, 1)
    total = tl.full((), 0, tl.int64)
    listed = tl.full((), 0, tl.int64)
    for table in range(count):
        seen = tl.zeros((WIDTH,), tl.int64)
        for segment in range(table, tl.where(is_layered, table + 1, segments)):
            fine = histograms + (mask * segments + segment) * BUCKETS + first
            for step in range(EXACT):  # an octave has no more fine buckets
                seen += tl.load(fine + step, mask=first + step < last, other=0)
        total += cost(seen, coarse, mantissa, logarithms, WIDTH) + tl.sum(seen * low, 0)
        length = tl.max(tl.where(seen > 0, place + 1, 0), 0)
        listed += tl.where(coarse, (length + 1) // 2, length) + (length > 0).to(tl.int32)
    header = tl.where(listed > 0, 1 + 4 * (count - 1) + listed, 0)
    tl.store(sizes + kind * tl.num_programs(0) + mask, header + code_bytes(total))


@triton.jit
def code_sizes_kernel(counts, mantissa, logarithms, sizes, CODES: tl.constexpr):
    """The bytes of one client's codes under a table of four bits each, or of eight."""
    client = tl.program_id(0).to(tl.int64)
    coarse = tl.program_id(1) == 0
    seen = tl.load(counts + client * CODES + tl.arange(0, CODES))
    present = tl.sum((seen > 0).to(tl.int32), 0)
    table = CODES + tl.where(present > 1, present * tl.where(coarse, 4, 8), 0)
    size = (table + 7) // 8 + code_bytes(cost(seen, coarse, mantissa, logarithms, CODES))
    tl.store(sizes + tl.program_id(1) * tl.num_programs(0) + client, size)


@triton.jit
def cost(seen, coarse, mantissa, logarithms, WIDTH: tl.constexpr):
    """``tables.cost`` of counts under the weights that are fitted to them."""
    place = tl.arange(0, WIDTH)
    weight = weights(log_weights(seen, coarse, logarithms), mantissa, place, WIDTH)
    information = tl.sum(seen * (CERTAIN - log2(weight, logarithms)), 0)
    likely = place == first_largest(weight, place, WIDTH)
    room = WHOLE - tl.max(weight, 0)
    by_symbol = tl.sum(tl.where(likely, seen, 0), 0) << 9
    by_word = ((information >> 21) + 2) * ((LOSS * WHOLE) // tl.maximum(room, 1))
    is_likely = (room > 0) & (room < WHOLE // 2)
    return information + tl.where(is_likely, tl.minimum(by_symbol, by_word), 0)


@triton.jit
def log_weights(seen, coarse, logarithms):
    """``tables.log_weights``."""
    wider = tl.where(coarse, COARSE, 0)
    most = tl.where(coarse, COARSE_TOP, TOP) - 1
    below_top = log2(tl.max(seen, 0), logarithms) - log2(seen, logarithms)
    steps = tl.minimum((below_top + (1 << (12 + wider))) >> (13 + wider), most)
    return tl.where(seen > 0, TOP - (steps << wider), 0)


@triton.jit
def weights(logs, mantissa, place, WIDTH: tl.constexpr):
    """``tables.weights``."""
    steps = tl.maximum(logs - 1, 0)
    share = tl.where(logs > 0, tl.load(mantissa + steps % 8) << (steps // 8), 0)
    free = WHOLE - tl.sum((share > 0).to(tl.int64), 0)
    found = tl.where(share > 0, 1 + share * free // tl.maximum(tl.sum(share, 0), 1), 0)
    rest = WHOLE - tl.sum(found, 0)
    return found + tl.where(place == first_largest(logs, place, WIDTH), rest, 0)


@triton.jit
def first_largest(x, place, WIDTH: tl.constexpr):
    """Where the largest of a vector is, the first of equals."""
    return tl.min(tl.where(x == tl.max(x, 0), place, WIDTH), 0)


@triton.jit
def log2(x, logarithms):
    """``tables.log2``."""
    form = tl.maximum(x, 1).to(tl.float64).to(tl.int64, bitcast=True)
    return (((form >> 52) - 1023) << 16) + tl.load(logarithms + ((form >> 40) & 4095))


@triton.jit
def code_bytes(total):
    """``tables.code_bytes``."""
    return tl.where(total > 0, (((total + (total >> 11)) >> 16) + 8) >> 3, 0)

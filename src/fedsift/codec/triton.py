"""Triton kernels for the sizes of entropy-coded masks and values; imported only with a GPU.

The arithmetic equals that of ``range_coder``, ``index_gaps`` and ``index_sizes`` bit for bit. One
program computes one row of their tensors. Few kernels are used, as launching one takes longer than
running it.
"""

import triton
import triton.language as tl

from fedsift.codec import index_gaps, range_coder

MAX_LOG = tl.constexpr(range_coder.MAX_LOG)
MAX_COARSE = tl.constexpr(range_coder.MAX_COARSE)
COARSE_SHIFT = tl.constexpr(range_coder.COARSE_SHIFT)
FLOOR_LOSS = tl.constexpr(range_coder.FLOOR_LOSS)
WHOLE = tl.constexpr(1 << range_coder.PRECISION)
WHOLE_LOG2 = tl.constexpr(range_coder.PRECISION << 16)
EXACT = tl.constexpr(1 << index_gaps.FINE_BITS)  # a gap below this is its own bucket
MANTISSA = tl.constexpr(52 - index_gaps.FINE_BITS)
EXPONENT = tl.constexpr((1022 + index_gaps.FINE_BITS) << index_gaps.FINE_BITS)
NUM_BUCKETS = tl.constexpr(index_gaps.NUM_BUCKETS)


@triton.jit
def gaps_kernel(indices, starts, counts, k, segments, BLOCK: tl.constexpr):
    """Count a block of one mask's gaps by segment and fine bucket; skip descending indices."""
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
    counter = counts + cell * NUM_BUCKETS + bucket
    tl.atomic_add(counter, one, mask=inside & (gap >= 0), sem="relaxed")


@triton.jit
def mask_sizes_kernel(
    histograms, ends, low_bits, mantissa, logarithms, sizes, segments, WIDTH: tl.constexpr
):
    """Compute one mask's size in bytes under one of the sixteen kinds of models."""
    mask = tl.program_id(0).to(tl.int64)
    kind = tl.program_id(1)
    sub_bits = kind & 3
    is_layered = (kind & 4) > 0
    coarse = (kind & 8) > 0
    place = tl.arange(0, WIDTH)
    is_bucket = place < NUM_BUCKETS
    first = tl.load(ends + sub_bits * (NUM_BUCKETS + 1) + place, mask=is_bucket, other=0)
    last = tl.load(ends + sub_bits * (NUM_BUCKETS + 1) + place + 1, mask=is_bucket, other=0)
    low = tl.load(low_bits + sub_bits * NUM_BUCKETS + place, mask=is_bucket, other=0)
    num_tables = tl.where(is_layered, segments, 1)
    total = tl.full((), 0, tl.int64)
    listed = tl.full((), 0, tl.int64)
    for table in range(num_tables):
        counts = tl.zeros((WIDTH,), tl.int64)
        for segment in range(table, tl.where(is_layered, table + 1, segments)):
            fine = histograms + (mask * segments + segment) * NUM_BUCKETS + first
            for step in range(EXACT):  # an octave has at most this many fine buckets
                counts += tl.load(fine + step, mask=first + step < last, other=0)
        total += code_bits(counts, coarse, mantissa, logarithms, WIDTH) + tl.sum(counts * low, 0)
        length = tl.max(tl.where(counts > 0, place + 1, 0), 0)
        listed += tl.where(coarse, (length + 1) // 2, length) + (length > 0).to(tl.int32)
    header = tl.where(listed > 0, 1 + 4 * (num_tables - 1) + listed, 0)
    tl.store(sizes + kind * tl.num_programs(0) + mask, header + code_bytes(total))


@triton.jit
def code_sizes_kernel(stack, mantissa, logarithms, sizes, CODES: tl.constexpr):
    """Compute the bytes of one client's codes under a table with four or eight bits per code."""
    client = tl.program_id(0).to(tl.int64)
    coarse = tl.program_id(1) == 0
    counts = tl.load(stack + client * CODES + tl.arange(0, CODES))
    present = tl.sum((counts > 0).to(tl.int32), 0)
    table = CODES + tl.where(present > 1, present * tl.where(coarse, 4, 8), 0)
    size = (table + 7) // 8 + code_bytes(code_bits(counts, coarse, mantissa, logarithms, CODES))
    tl.store(sizes + tl.program_id(1) * tl.num_programs(0) + client, size)


@triton.jit
def code_bits(counts, coarse, mantissa, logarithms, WIDTH: tl.constexpr):
    """Compute ``range_coder.code_bits`` under the table fitted to the counts."""
    place = tl.arange(0, WIDTH)
    weight = probabilities(log_weights(counts, coarse, logarithms), mantissa, place, WIDTH)
    information = tl.sum(counts * (WHOLE_LOG2 - log2(weight, logarithms)), 0)
    likeliest = place == first_largest(weight, place, WIDTH)
    rest = WHOLE - tl.max(weight, 0)
    by_symbol = tl.sum(tl.where(likeliest, counts, 0), 0) << 9
    by_word = ((information >> 21) + 2) * ((FLOOR_LOSS * WHOLE) // tl.maximum(rest, 1))
    is_likely = (rest > 0) & (rest < WHOLE // 2)
    return information + tl.where(is_likely, tl.minimum(by_symbol, by_word), 0)


@triton.jit
def log_weights(counts, coarse, logarithms):
    """Compute ``range_coder.log_weights``."""
    shift = tl.where(coarse, COARSE_SHIFT, 0)
    most = tl.where(coarse, MAX_COARSE, MAX_LOG) - 1
    below_top = log2(tl.max(counts, 0), logarithms) - log2(counts, logarithms)
    steps = tl.minimum((below_top + (1 << (12 + shift))) >> (13 + shift), most)
    return tl.where(counts > 0, MAX_LOG - (steps << shift), 0)


@triton.jit
def probabilities(logs, mantissa, place, WIDTH: tl.constexpr):
    """Compute ``range_coder.probabilities``."""
    steps = tl.maximum(logs - 1, 0)
    share = tl.where(logs > 0, tl.load(mantissa + steps % 8) << (steps // 8), 0)
    free = WHOLE - tl.sum((share > 0).to(tl.int64), 0)
    scaled = tl.where(share > 0, 1 + share * free // tl.maximum(tl.sum(share, 0), 1), 0)
    rest = WHOLE - tl.sum(scaled, 0)
    return scaled + tl.where(place == first_largest(logs, place, WIDTH), rest, 0)


@triton.jit
def first_largest(x, place, WIDTH: tl.constexpr):
    """Return the position of the first largest element of a vector."""
    return tl.min(tl.where(x == tl.max(x, 0), place, WIDTH), 0)


@triton.jit
def log2(x, logarithms):
    """Compute ``range_coder.log2``."""
    form = tl.maximum(x, 1).to(tl.float64).to(tl.int64, bitcast=True)
    return (((form >> 52) - 1023) << 16) + tl.load(logarithms + ((form >> 40) & 4095))


@triton.jit
def code_bytes(bits):
    """Compute ``range_coder.code_bytes``."""
    return tl.where(bits > 0, (((bits + (bits >> 11)) >> 16) + 8) >> 3, 0)

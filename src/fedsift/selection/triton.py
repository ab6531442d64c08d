"""Top-k masks and their positions in Triton; imported only where there is a GPU.

The magnitudes of float32 numbers are compared as the whole numbers that their bits are. Grids are
(blocks of a row, rows), and of rows that fit into one block just (rows,).
"""

import triton
import triton.language as tl

DIGIT = tl.constexpr(11)
BUCKETS = tl.constexpr(1 << 11)
EVERYTHING = tl.constexpr(31 - 11)  # the shift at which the buckets span all magnitudes
SETTLED = tl.constexpr(-1)


@triton.jit
def magnitudes(x, at, d):
    """The bits of |x|, which have the order of the numbers; less than any beyond the row's end."""
    bits = tl.load(x + at, mask=at < d, other=0.0).to(tl.int32, bitcast=True)
    return tl.where(at < d, bits & 0x7FFFFFFF, -1)


@triton.jit
def short_top_k_kernel(x, mask, d, stride, k, BLOCK: tl.constexpr):
    """The mask of a row that fits into one block: its k-th largest magnitude, bit by bit."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    bits = magnitudes(x + row * stride, at, d)
    kth = tl.full((), 0, tl.int32)
    for place in range(31):
        higher = kth | (1 << (30 - place))
        kth = tl.where(tl.sum((bits >= higher).to(tl.int32), 0) >= k, higher, kth)
    room = k - tl.sum((bits > kth).to(tl.int32), 0)
    tl.store(mask + row * d + at, with_ties(bits, kth, room), mask=at < d)


@triton.jit
def with_ties(bits, kth, room):
    """What is above the k-th magnitude, and as many of its equals as there is room for."""
    tied = bits == kth
    among = tl.cumsum(tied.to(tl.int32), 0) <= room
    return ((bits > kth) | (tied & among)).to(tl.uint8)


@triton.jit
def tally_kernel(x, spans, seen, d, stride, BLOCK: tl.constexpr, TURNS: tl.constexpr):
    """Count a piece of a row by buckets of 2**shift magnitudes from ``low`` on, and what is above.

    Many numbers can be equal to ``low`` or above all buckets: they are added up before they are
    counted, as a GPU adds to one counter one by one.
    """
    row = tl.program_id(1).to(tl.int64)
    low = tl.load(spans + row * 3)
    shift = tl.load(spans + row * 3 + 1)
    if shift != SETTLED:
        counters = seen + row * (BUCKETS + 1)
        lowest = tl.zeros((BLOCK,), tl.int32)
        above = tl.zeros((BLOCK,), tl.int32)
        one = tl.full((BLOCK,), 1, tl.int32)
        for turn in range(TURNS):
            at = (tl.program_id(0) * TURNS + turn) * BLOCK + tl.arange(0, BLOCK)
            bits = magnitudes(x + row * stride, at, d)
            bucket = (bits - low) >> shift
            lowest += (bits == low).to(tl.int32)
            above += (bucket >= BUCKETS).to(tl.int32)
            between = (bits > low) & (bucket < BUCKETS)
            tl.atomic_add(counters + bucket, one, mask=between, sem="relaxed")
        tl.atomic_add(counters, tl.sum(lowest, 0), sem="relaxed")
        tl.atomic_add(counters + BUCKETS, tl.sum(above, 0), sem="relaxed")


@triton.jit
def narrow_kernel(spans, seen, k):
    """Go on with the bucket that holds a row's k-th magnitude; with everything, if none does.

    A bucket of one magnitude settles it; ``room`` is then how many of its equals are kept.
    """
    row = tl.program_id(0).to(tl.int64)
    spans += row * 3
    low = tl.load(spans)
    shift = tl.load(spans + 1)
    if shift != SETTLED:
        counters = seen + row * (BUCKETS + 1)
        place = tl.arange(0, BUCKETS)
        here = tl.load(counters + place)
        above = tl.load(counters + BUCKETS)
        reaching = above + tl.sum(here, 0) - tl.cumsum(here, 0) + here
        bucket = tl.sum((reaching >= k).to(tl.int32), 0) - 1
        is_here = (bucket >= 0) & (above < k)
        finer = tl.where(shift > 0, tl.maximum(shift - DIGIT, 0), SETTLED)
        tl.store(spans, tl.where(is_here, low + (bucket << shift), 0))
        tl.store(spans + 1, tl.where(is_here, finer, EVERYTHING))
        tl.store(spans + 2, k - above - tl.sum(tl.where(place > bucket, here, 0), 0))
        tl.store(counters + place, tl.zeros((BUCKETS,), tl.int32))
        tl.store(counters + BUCKETS, 0)


@triton.jit
def mark_kernel(x, spans, mask, tied, d, stride, BLOCK: tl.constexpr):
    """Mark what reaches the k-th magnitude, and count its equals in each block."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kth = tl.load(spans + row * 3)
    bits = magnitudes(x + row * stride, at, d)
    tl.store(mask + row * d + at, (bits >= kth).to(tl.uint8), mask=at < d)
    equals = tl.sum((bits == kth).to(tl.int32), 0)
    tl.store(tied + row * tl.num_programs(0) + tl.program_id(0), equals)


@triton.jit
def untie_kernel(x, spans, mask, upto, d, stride, BLOCK: tl.constexpr):
    """Take back the equals for which there is no room; few blocks have any."""
    row = tl.program_id(1).to(tl.int64)
    kth = tl.load(spans + row * 3)
    room = tl.load(spans + row * 3 + 2)
    before, now = around_block(upto, row)
    if (now > before) & (now > room):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        bits = magnitudes(x + row * stride, at, d)
        tl.store(mask + row * d + at, with_ties(bits, kth, room - before), mask=at < d)


@triton.jit
def around_block(upto, row):
    """How many have been counted before this block and after it."""
    block = tl.program_id(0)
    place = upto + row * tl.num_programs(0) + block
    return tl.load(place - 1, mask=block > 0, other=0), tl.load(place)


@triton.jit
def count_kernel(mask, ones, d, BLOCK: tl.constexpr):
    """Count the ones in each block of a mask."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(mask + row * d + at, mask=at < d, other=0).to(tl.int32)
    tl.store(ones + row * tl.num_programs(0) + tl.program_id(0), tl.sum(found, 0))


@triton.jit
def positions_kernel(mask, upto, indices, d, k, SEVERAL: tl.constexpr, BLOCK: tl.constexpr):
    """Write down where the ones of a block are; ``upto`` is read if a row has SEVERAL blocks."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(mask + row * d + at, mask=at < d, other=0).to(tl.int32)
    rank = tl.cumsum(found, 0) - 1
    if SEVERAL:
        rank += around_block(upto, row)[0]
    is_one = (found > 0) & (rank < k)
    tl.store(indices + row * k + rank, at.to(tl.int64), mask=is_one)


@triton.jit
def difference_kernel(indices, x, since, result, k, x_stride, since_stride, BLOCK: tl.constexpr):
    """Subtract two rows at a block of indices."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices + row * k + at, mask=at < k, other=0)
    now = tl.load(x + row * x_stride + index, mask=at < k, other=0.0)
    then = tl.load(since + row * since_stride + index, mask=at < k, other=0.0)
    tl.store(result + row * k + at, now - then, mask=at < k)

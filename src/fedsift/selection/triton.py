"""Triton kernels for top-k masks and their positions; imported only with a GPU.

Magnitudes of float32 numbers are compared as integers: their bits have the same order. Grids are
(blocks of a row, rows), or (rows,) if a row fits into one block. A row's span holds three integers:
``low``, the smallest magnitude that its k-th magnitude can have; ``shift``, for buckets of 2**shift
magnitudes, or FOUND once the k-th magnitude is ``low``; and ``room``, the number of magnitudes
equal to it that are kept.
"""

import triton
import triton.language as tl

DIGIT_BITS = tl.constexpr(11)
NUM_BUCKETS = tl.constexpr(1 << 11)
WHOLE_RANGE = tl.constexpr(31 - 11)  # the shift at which the buckets span all magnitudes
FOUND = tl.constexpr(-1)


@triton.jit
def magnitudes(x, at, d):
    """Return the bits of |x|, and -1 beyond the end of the row."""
    bits = tl.load(x + at, mask=at < d, other=0.0).to(tl.int32, bitcast=True)
    return tl.where(at < d, bits & 0x7FFFFFFF, -1)


@triton.jit
def short_top_k_kernel(x, mask, d, stride, k, BLOCK: tl.constexpr):
    """Write the mask of a row that fits into one block; find its k-th magnitude bit by bit."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    bits = magnitudes(x + row * stride, at, d)
    kth = tl.full((), 0, tl.int32)
    for place in range(31):
        higher = kth | (1 << (30 - place))
        kth = tl.where(tl.sum((bits >= higher).to(tl.int32), 0) >= k, higher, kth)
    room = k - tl.sum((bits > kth).to(tl.int32), 0)
    tl.store(mask + row * d + at, mask_with_ties(bits, kth, room), mask=at < d)


@triton.jit
def mask_with_ties(bits, kth, room):
    """Mark what is above the k-th magnitude, and the first ``room`` of those equal to it."""
    is_tied = bits == kth
    has_room = tl.cumsum(is_tied.to(tl.int32), 0) <= room
    return ((bits > kth) | (is_tied & has_room)).to(tl.uint8)


@triton.jit
def histogram_kernel(x, spans, counts, d, stride, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr):
    """Count NUM_BLOCKS blocks of a row by the buckets of its span, and what is above.

    Many magnitudes can equal ``low`` or be above all buckets. They are summed first, because atomic
    additions to one counter are serialized.
    """
    row = tl.program_id(1).to(tl.int64)
    low = tl.load(spans + row * 3)
    shift = tl.load(spans + row * 3 + 1)
    if shift != FOUND:
        counters = counts + row * (NUM_BUCKETS + 1)
        lowest = tl.zeros((BLOCK,), tl.int32)
        above = tl.zeros((BLOCK,), tl.int32)
        one = tl.full((BLOCK,), 1, tl.int32)
        for block in range(NUM_BLOCKS):
            at = (tl.program_id(0) * NUM_BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
            bits = magnitudes(x + row * stride, at, d)
            bucket = (bits - low) >> shift
            lowest += (bits == low).to(tl.int32)
            above += (bucket >= NUM_BUCKETS).to(tl.int32)
            between = (bits > low) & (bucket < NUM_BUCKETS)
            tl.atomic_add(counters + bucket, one, mask=between, sem="relaxed")
        tl.atomic_add(counters, tl.sum(lowest, 0), sem="relaxed")
        tl.atomic_add(counters + NUM_BUCKETS, tl.sum(above, 0), sem="relaxed")


@triton.jit
def narrow_kernel(spans, counts, k):
    """Narrow a span to the bucket with the k-th magnitude, or reset it to the whole range.

    A bucket of a single magnitude is the k-th magnitude.
    """
    row = tl.program_id(0).to(tl.int64)
    spans += row * 3
    low = tl.load(spans)
    shift = tl.load(spans + 1)
    if shift != FOUND:
        counters = counts + row * (NUM_BUCKETS + 1)
        place = tl.arange(0, NUM_BUCKETS)
        in_bucket = tl.load(counters + place)
        above = tl.load(counters + NUM_BUCKETS)
        at_least = above + tl.sum(in_bucket, 0) - tl.cumsum(in_bucket, 0) + in_bucket
        bucket = tl.sum((at_least >= k).to(tl.int32), 0) - 1
        is_in_span = (bucket >= 0) & (above < k)
        finer = tl.where(shift > 0, tl.maximum(shift - DIGIT_BITS, 0), FOUND)
        tl.store(spans, tl.where(is_in_span, low + (bucket << shift), 0))
        tl.store(spans + 1, tl.where(is_in_span, finer, WHOLE_RANGE))
        tl.store(spans + 2, k - above - tl.sum(tl.where(place > bucket, in_bucket, 0), 0))
        tl.store(counters + place, tl.zeros((NUM_BUCKETS,), tl.int32))
        tl.store(counters + NUM_BUCKETS, 0)


@triton.jit
def mark_kernel(x, spans, mask, tied, d, stride, BLOCK: tl.constexpr):
    """Mark what is at least the k-th magnitude, and count what equals it in each block."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kth = tl.load(spans + row * 3)
    bits = magnitudes(x + row * stride, at, d)
    tl.store(mask + row * d + at, (bits >= kth).to(tl.uint8), mask=at < d)
    equals = tl.sum((bits == kth).to(tl.int32), 0)
    tl.store(tied + row * tl.num_programs(0) + tl.program_id(0), equals)


@triton.jit
def break_ties_kernel(x, spans, mask, cumulative, d, stride, BLOCK: tl.constexpr):
    """Unmark what equals the k-th magnitude beyond ``room``; few blocks have any."""
    row = tl.program_id(1).to(tl.int64)
    kth = tl.load(spans + row * 3)
    room = tl.load(spans + row * 3 + 2)
    before, after = counts_around_block(cumulative, row)
    if (after > before) & (after > room):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        bits = magnitudes(x + row * stride, at, d)
        tl.store(mask + row * d + at, mask_with_ties(bits, kth, room - before), mask=at < d)


@triton.jit
def counts_around_block(cumulative, row):
    """Return the cumulative counts before and after this block."""
    block = tl.program_id(0)
    place = cumulative + row * tl.num_programs(0) + block
    return tl.load(place - 1, mask=block > 0, other=0), tl.load(place)


@triton.jit
def count_kernel(mask, ones, d, BLOCK: tl.constexpr):
    """Count the ones in each block of a mask."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ones_in_block = tl.load(mask + row * d + at, mask=at < d, other=0).to(tl.int32)
    tl.store(ones + row * tl.num_programs(0) + tl.program_id(0), tl.sum(ones_in_block, 0))


@triton.jit
def positions_kernel(mask, cumulative, indices, d, k, IS_SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """Write the positions of a block's ones; IS_SPLIT if a row has several blocks."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ones_in_block = tl.load(mask + row * d + at, mask=at < d, other=0).to(tl.int32)
    rank = tl.cumsum(ones_in_block, 0) - 1
    if IS_SPLIT:
        rank += counts_around_block(cumulative, row)[0]
    is_one = (ones_in_block > 0) & (rank < k)
    tl.store(indices + row * k + rank, at.to(tl.int64), mask=is_one)


@triton.jit
def difference_kernel(indices, x, since, result, k, x_stride, since_stride, BLOCK: tl.constexpr):
    """Write x - since at a block of indices."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices + row * k + at, mask=at < k, other=0)
    end = tl.load(x + row * x_stride + index, mask=at < k, other=0.0)
    start = tl.load(since + row * since_stride + index, mask=at < k, other=0.0)
    tl.store(result + row * k + at, end - start, mask=at < k)

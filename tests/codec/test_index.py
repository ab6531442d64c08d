"""Index coders: exact sizes, the information limit, and refusal of hostile bytes."""

from math import lgamma, log

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsift.codec import index_gaps
from fedsift.codec.errors import FrameError
from fedsift.codec.index import (
    INDEX_CODERS,
    Bitmap,
    Entropy,
    IndexCoder,
    Packed,
    encode_shortest,
    entropy_size,
    gap_histogram,
    shortest_sizes,
)
from fedsift.codec.index_sizes import smallest_sizes
from fedsift.codec.range_coder import IntArray

ONE_LAYER = np.array([0])
BY_NAME = pytest.mark.parametrize("coder", INDEX_CODERS, ids=lambda coder: coder.name)


def random_mask(d: int, k: int, seed: int = 0) -> IntArray:
    return np.sort(np.random.default_rng(seed).choice(d, k, replace=False))


def limit_bytes(d: int, k: int) -> float:
    return (lgamma(d + 1) - lgamma(k + 1) - lgamma(d - k + 1)) / log(2) / 8


def check_round_trip(coder: IndexCoder, indices: IntArray, d: int, layers: IntArray) -> bytes:
    payload = coder.encode(indices, d, layers)
    assert len(payload) == coder.size(indices, d, layers)
    decoded = coder.decode(payload, len(indices), d, layers)
    assert decoded.dtype == np.int64
    np.testing.assert_array_equal(decoded, indices)
    return payload


@st.composite
def masks(draw: st.DrawFn) -> tuple[IntArray, int]:
    """Draw uniform, clustered, empty, full and periodic masks of small and medium d."""
    d = draw(st.integers(1, 100) | st.integers(100, 5000))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    density = draw(st.sampled_from([0.0, 0.001, 0.05, 0.3, 0.5, 0.7, 0.99, 1.0]))
    mask = rng.random(d) < density
    if draw(st.booleans()):
        mask &= rng.random(d).cumsum() % 20 < 5
    if draw(st.booleans()):
        mask[draw(st.integers(0, d - 1)) :] = draw(st.booleans())
    return np.flatnonzero(mask), d


@BY_NAME
@settings(max_examples=150, deadline=None)
@given(mask=masks(), cuts=st.sets(st.integers(1, 4999), max_size=8))
def test_round_trip_and_exact_size(
    coder: IndexCoder, mask: tuple[IntArray, int], cuts: set[int]
) -> None:
    indices, d = mask
    layers = np.array([0, *sorted(cut for cut in cuts if cut < d)])
    check_round_trip(coder, indices, d, layers)


@BY_NAME
def test_every_mask_of_a_tiny_vector(coder: IndexCoder) -> None:
    for d in range(1, 8):
        for mask in range(2**d):
            indices = np.array([i for i in range(d) if mask >> i & 1], np.int64)
            check_round_trip(coder, indices, d, ONE_LAYER)


@pytest.mark.parametrize("layer", [70_000, 65_536, 30_000, 10**6])
def test_layers_of_different_density(layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    d = 1_000_000
    rng = np.random.default_rng(1)
    layers = np.arange(0, d, layer)
    density = np.repeat(0.3 * rng.random(len(layers)) ** 8, layer)[:d]
    indices = np.flatnonzero(rng.random(d) < density)
    payload = check_round_trip(Entropy(), indices, d, layers)
    assert bool(payload[0] & 4) == (65_536 <= layer < d)
    if payload[0] & 4:
        assert len(payload) < Entropy().size(indices, d, ONE_LAYER)


def test_an_empty_segment_needs_no_table() -> None:
    d = 400_000
    layers = np.array([0, 100_000, 200_000, 300_000])
    indices = np.concatenate([random_mask(100_000, 30_000), 300_000 + random_mask(100_000, 50)])
    assert check_round_trip(Entropy(), indices, d, layers)[0] & 4


@pytest.mark.parametrize("density", [0.001, 0.01, 0.05, 0.2])
def test_uniform_masks_reach_the_information_limit(density: float) -> None:
    d = 10_000_000
    k = round(density * d)
    indices = random_mask(d, k)
    limit = limit_bytes(d, k)
    assert limit < Entropy().size(indices, d, ONE_LAYER) <= 1.005 * limit + 64
    assert encode_shortest(indices, d, ONE_LAYER)[0].name == "entropy"


def test_clustered_masks_are_smaller_than_the_limit() -> None:
    rng = np.random.default_rng(0)
    d = 200_000
    hot = np.repeat(rng.random(d // 25) < 0.1, 25)
    indices = np.flatnonzero(hot & (rng.random(d) < 0.5))
    assert Entropy().size(indices, d, ONE_LAYER) < 0.75 * limit_bytes(d, len(indices))


@pytest.mark.parametrize("d", [1, 10, 21_840, 1_000_000])
def test_full_and_empty_masks_take_no_bytes(d: int) -> None:
    for k in (0, d):
        assert check_round_trip(Entropy(), np.arange(k), d, ONE_LAYER) == b""


def test_one_index_and_all_but_one() -> None:
    d = 3_000_000
    for kept in (np.array([2_999_999]), np.delete(np.arange(d), 77)):
        assert len(check_round_trip(Entropy(), kept, d, ONE_LAYER)) < 64


def test_gaps_of_every_magnitude() -> None:
    indices = np.unique(
        np.concatenate([[0, 1, 2], 2 ** np.arange(2, 32), 2 ** np.arange(2, 32) - 1])
    )
    d = 2**32 - 1
    check_round_trip(Entropy(), indices, d, ONE_LAYER)
    check_round_trip(Packed(), indices, d, ONE_LAYER)


@pytest.mark.parametrize("clusters", [1, 20, 5000])
def test_likely_symbols_stay_within_the_size(clusters: int) -> None:
    """Clusters make one bucket very likely, where the range coder loses most."""
    d = 1_000_000
    starts = random_mask(d // 100, clusters) * 100
    indices = np.unique((starts[:, None] + np.arange(90)).ravel())
    check_round_trip(Entropy(), indices, d, ONE_LAYER)


def test_the_shortest_coder_is_chosen() -> None:
    for d, k in [(8, 4), (1000, 1), (1000, 500), (100_000, 5000), (100_000, 99_000), (5, 0)]:
        indices = random_mask(d, k)
        sizes = [coder.size(indices, d, ONE_LAYER) for coder in INDEX_CODERS]
        coder, payload = encode_shortest(indices, d, ONE_LAYER)
        assert len(payload) == min(sizes)
        assert coder.decode(payload, k, d, ONE_LAYER).tolist() == indices.tolist()
        stack = torch.from_numpy(indices)[None]
        assert shortest_sizes(stack, d, ONE_LAYER) == [(coder, len(payload))]


def test_the_size_depends_only_on_the_histogram() -> None:
    d, layers = 500_000, np.array([0, 100_000, 100_010, 300_000])
    indices = np.sort(
        np.concatenate([random_mask(100_000, 9000), 300_000 + random_mask(9000, 800)])
    )
    histogram = gap_histogram(indices, d, layers)
    assert histogram.shape == (3, 240)
    assert histogram.sum() == len(indices)
    assert entropy_size(histogram) == len(Entropy().encode(indices, d, layers))


@BY_NAME
@pytest.mark.parametrize("bad", [[3, 2], [2, 2], [-1, 2], [2, 10]])
def test_indices_that_do_not_ascend_are_not_encoded(coder: IndexCoder, bad: list[int]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        coder.encode(np.array(bad), 10, ONE_LAYER)


# Hostile bytes.


def refused(
    coder: IndexCoder, payload: bytes, k: int, d: int, layers: IntArray = ONE_LAYER
) -> None:
    with pytest.raises(FrameError):
        coder.decode(payload, k, d, layers)


@BY_NAME
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_changed_bytes_are_refused_or_give_a_valid_mask(
    coder: IndexCoder, data: st.DataObject
) -> None:
    indices, d = data.draw(masks())
    layers = np.array([0, *{d // 2} - {0}])
    good = bytearray(coder.encode(indices, d, layers))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(good)))
        good[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    k = len(indices) + data.draw(st.sampled_from([0, 0, 0, -1, 1]))
    try:
        decoded = coder.decode(bytes(good), k, d, layers)
    except FrameError:
        return
    assert len(decoded) == k
    assert (np.diff(decoded) > 0).all()
    assert k == 0 or (decoded[0] >= 0 and decoded[-1] < d)


@BY_NAME
@settings(max_examples=200, deadline=None)
@given(payload=st.binary(max_size=60), k=st.integers(-1, 300), d=st.integers(1, 300))
def test_random_bytes(coder: IndexCoder, payload: bytes, k: int, d: int) -> None:
    try:
        decoded = coder.decode(payload, k, d, ONE_LAYER)
    except FrameError:
        return
    assert len(decoded) == k


@BY_NAME
def test_a_changed_length_is_refused(coder: IndexCoder) -> None:
    indices, d = random_mask(5000, 250), 5000
    payload = coder.encode(indices, d, ONE_LAYER)
    for changed in (payload[:-1], payload[:-4], payload + b"\0", payload + bytes(4), b""):
        refused(coder, changed, 250, d)
    for k in (249, 251, -1, 5001):
        refused(coder, payload, k, d)


def test_bitmap_with_wrong_padding_or_count() -> None:
    refused(Bitmap(), b"\x01\x04", 2, 10)
    refused(Bitmap(), b"\x01\x01", 1, 10)


def test_packed_with_wrong_order_range_or_padding() -> None:
    refused(Packed(), bytes([6 | 1 << 3]), 2, 8)  # 6, 1
    refused(Packed(), bytes([1 | 1 << 3]), 2, 8)  # 1, 1
    refused(Packed(), bytes([1 | 7 << 3]), 2, 7)  # 1, 7 of [0, 7)
    refused(Packed(), bytes([1 | 6 << 3 | 1 << 6]), 2, 8)


def test_entropy_with_a_changed_bit_is_another_mask_or_refused() -> None:
    indices, d = random_mask(3000, 150), 3000
    payload = Entropy().encode(indices, d, ONE_LAYER)
    for bit in range(8 * (len(payload) - 40), 8 * (len(payload) - 20)):
        changed = bytearray(payload)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            decoded = Entropy().decode(bytes(changed), 150, d, ONE_LAYER)
        except FrameError:
            continue
        assert not np.array_equal(decoded, indices)


def test_entropy_with_a_malformed_header() -> None:
    d, layers = 200_000, np.array([0, 100_000])
    indices = np.concatenate([random_mask(100_000, 20_000), 100_000 + random_mask(100_000, 100)])
    buckets = index_gaps.fine_buckets(index_gaps.gaps_of(indices))
    model = index_gaps.GapModel.fit(index_gaps.segment_histogram(indices, layers, buckets), 4)
    payload = model.header() + model.encode(index_gaps.gaps_of(indices), buckets)
    assert Entropy().decode(payload, len(indices), d, layers).tolist() == indices.tolist()
    k = len(indices)
    length = payload[5]
    cases = {
        "unknown model": bytes([16]) + payload[1:],
        "truncated": payload[:3],
        "impossible counts": payload[:1] + (100_001).to_bytes(4, "little") + payload[5:],
        "more than k": payload[:1] + (k + 1).to_bytes(4, "little") + payload[5:],
        "other counts": payload[:1] + (20_001).to_bytes(4, "little") + payload[5:],
        "no table": payload[:5] + b"\0" + payload[6:],
        "long table": payload[:5] + b"\xff" + payload[6:],
        "weight above the top": payload[:6] + bytes([193]) + payload[7:],
        "open table": payload[: 5 + length] + b"\0" + payload[6 + length :],
        "half a table": payload[:20],
        "no words": payload[: 6 + length],
    }
    for changed in cases.values():
        refused(Entropy(), changed, k, d, layers)


def test_entropy_index_outside_its_layer() -> None:
    """Encode a gap that ends outside the vector."""
    gaps = np.array([3, 10])
    buckets = index_gaps.fine_buckets(gaps)
    model = index_gaps.GapModel.fit(np.bincount(buckets, minlength=240)[None], 0)
    payload = model.header() + model.encode(gaps, buckets)
    assert Entropy().decode(payload, 2, 15, ONE_LAYER).tolist() == [3, 14]
    refused(Entropy(), payload, 2, 14)


def test_a_small_payload_cannot_have_huge_sizes() -> None:
    for coder in INDEX_CODERS:
        refused(coder, b"\0\x01\xc0" + bytes(8), 2**40, 2**50)
        refused(coder, b"", 10**6, 10**9)


# The specification, as a reference implementation that shares no code with the coder.


def reference_encode(indices: list[int], sub_bits: int, logs: list[int], size: int) -> bytes:
    """Encode gaps under one table of log-weights in ``size`` bytes of a 64-bit range coder."""
    gaps = [b - a - 1 for a, b in zip([-1, *indices[:-1]], indices, strict=True)]
    split = [reference_bucket(gap, sub_bits) for gap in gaps]
    present = [b for b, v in enumerate(logs) if v]
    weights = reference_weights([logs[b] for b in present])
    low, rng, bits = 0, 2**64 - 1, 64

    def put(left: int, weight: int) -> None:
        nonlocal low, rng, bits
        low += (rng >> 24) * left
        rng = (rng >> 24) * weight
        while rng < 2**32:
            low, rng, bits = low << 32, rng << 32, bits + 32

    if len(weights) > 1:
        for bucket, _ in split:
            i = present.index(bucket)
            put(sum(weights[:i]), weights[i])
    for gap, (_, width) in zip(gaps, split, strict=True):
        assert width <= 16
        if width:
            put((gap & (1 << width) - 1) << (24 - width), 1 << (24 - width))
    words = -(-low >> 32) << 32  # low rounded up to words, then to bytes
    code = -(-(words << 8 * size) >> bits)
    assert code << bits < low + rng << 8 * size
    assert 8 * size <= 1.001 * (bits - log(rng, 2)) + 16, "fewer bytes would do"
    return code.to_bytes(size, "big")


def reference_bucket(gap: int, sub_bits: int) -> tuple[int, int]:
    width = max(gap.bit_length() - 1 - sub_bits, 0)
    return (width << sub_bits) + (gap >> width), width


def reference_weights(logs: list[int]) -> list[int]:
    mantissa = [1024, 1117, 1218, 1328, 1448, 1579, 1722, 1878]
    share = [mantissa[(v - 1) % 8] << (v - 1) // 8 for v in logs]
    weights = [1 + x * (2**24 - len(logs)) // sum(share) for x in share]
    weights[logs.index(max(logs))] += 2**24 - sum(weights)
    return weights


@pytest.mark.parametrize("kind", [*range(4), *range(8, 12)])
@pytest.mark.parametrize("k", [*range(2, 40), 400, 3000])
def test_the_bytes_follow_the_specification(kind: int, k: int) -> None:
    d = 20 * k
    indices = random_mask(d, k, seed=k)
    model = index_gaps.GapModel.fit(gap_histogram(indices, d, ONE_LAYER), kind)
    gaps = index_gaps.gaps_of(indices)
    written = model.encode(gaps, index_gaps.fine_buckets(gaps))
    logs = model.logs[0].tolist()
    assert written == reference_encode(indices.tolist(), kind & 3, logs, len(written))


@pytest.mark.parametrize("layers", [ONE_LAYER, np.array([0, 70_000, 150_000, 150_400])])
def test_histograms_of_a_stack_are_those_of_its_rows(layers: IntArray) -> None:
    d, k = 200_000, 5_000
    rows = np.stack([random_mask(d, k, seed) for seed in range(3)])
    starts = index_gaps.segment_starts(layers, d)
    both = index_gaps.stacked_histograms(torch.from_numpy(rows), starts)
    sizes = smallest_sizes(both).tolist()
    for counted, size, row in zip(both.numpy(), sizes, rows, strict=True):
        assert np.array_equal(counted, gap_histogram(row, d, layers))
        assert size == entropy_size(counted) == Entropy().size(row, d, layers)


@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 239), st.integers(0, 2**20)), max_size=40),
)
def test_the_sizes_of_a_stack_are_those_of_its_masks(tables: int, cells: list) -> None:
    histogram = np.zeros((tables, 240), np.int64)
    for table, bucket, times in cells:
        histogram[table % tables, bucket] += times
    both = [histogram, histogram[::-1].copy()]
    together = smallest_sizes(torch.from_numpy(np.stack(both)))
    assert together.tolist() == [entropy_size(each) for each in both]

"""The Triton kernels for sizes, compared with PyTorch and with encoded bytes.

Without a GPU, Triton interprets them, which is slow.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsift.codec import index, index_gaps, index_sizes, value_entropy
from fedsift.codec.index import Entropy

pytest.importorskip("triton", reason="Triton is not installed: there are no kernels to test")

from fedsift.codec import gpu_sizes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS = {
    "one": np.array([0]),
    "three": np.array([0, 70_000, 150_000, 150_400]),
    "many": np.arange(7) << 16,
}


def stack(clients: int, d: int, k: int) -> torch.Tensor:
    """Return masks in which later coordinates are ten times as likely."""
    draw = np.random.default_rng(k)
    chances = np.repeat([1.0, 10.0], [d // 2, d - d // 2])
    chosen = [draw.choice(d, k, replace=False, p=chances / chances.sum()) for _ in range(clients)]
    return torch.from_numpy(np.sort(np.stack(chosen), axis=-1))


@pytest.mark.parametrize(
    ("clients", "d", "k", "layers"),
    [
        (3, 5_000, 250, "one"),
        (1, 10, 1, "one"),
        (2, 50, 50, "one"),
        (2, 200_000, 2_500, "three"),
        (1, 7 << 16, 3_000, "many"),
    ],
)
def test_the_sizes_of_a_stack_of_masks_are_those_of_their_bytes(clients, d, k, layers, monkeypatch):
    rows, starts = stack(clients, d, k), index_gaps.segment_starts(LAYERS[layers], d)
    counted = gpu_sizes.gap_histograms(rows.to(DEVICE), starts)
    assert torch.equal(counted.cpu(), index_gaps.stacked_histograms(rows, starts))
    monkeypatch.setattr(index_sizes, "can_use_triton", lambda x: True)
    coded = rows if 2 * k <= d else index._stacked_complement(rows, d)
    found = index_sizes.mask_sizes(coded.to(DEVICE), starts).tolist()
    assert found == [len(Entropy().encode(row.numpy(), d, LAYERS[layers])) for row in rows]


def test_descending_indices_are_not_counted():
    rows = torch.tensor([[50, 0, 0], [5, 6, 7]])
    counted = gpu_sizes.gap_histograms(rows.to(DEVICE), np.array([0])).cpu()
    assert counted.sum(-1).tolist() == [[1], [3]]


def test_counts_may_be_strided():
    seen = torch.arange(2 * 240, device=DEVICE).view(240, 1, 2).permute(2, 1, 0)
    assert torch.equal(gpu_sizes.mask_sizes(seen).cpu(), index_sizes.smallest_sizes(seen.cpu()))
    codes = seen[:, 0, :16]
    assert torch.equal(gpu_sizes.code_sizes(codes).cpu(), value_entropy.coded_sizes(codes.cpu()))


counts = st.one_of(st.just(0), st.integers(0, 3), st.integers(0, 2**31))


@settings(max_examples=10)
@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 239), counts), max_size=40),
)
def test_mask_sizes_equal_those_of_pytorch(tables, cells):
    histogram = torch.zeros(1, tables, 240, dtype=torch.int64)
    for table, bucket, times in cells:
        histogram[0, table % tables, bucket] += times
    found = gpu_sizes.mask_sizes(histogram.to(DEVICE))
    assert torch.equal(found.cpu(), index_sizes.smallest_sizes(histogram))


@settings(max_examples=25)
@given(st.data(), st.integers(2, 8))
def test_code_sizes_equal_those_of_pytorch(data, bits):
    some = st.lists(counts, min_size=1, max_size=1 << bits)
    seen = torch.zeros(2, 1 << bits, dtype=torch.int64)
    for row in seen:
        given = torch.tensor(data.draw(some))
        row[-len(given) :] = given
    expected = value_entropy.coded_sizes(seen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(value_entropy, "can_use_triton", lambda x: True)
        assert torch.equal(value_entropy.coded_sizes(seen.to(DEVICE)).cpu(), expected)

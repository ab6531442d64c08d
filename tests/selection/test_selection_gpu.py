"""The Triton kernels for selection, compared with a sort.

Without a GPU, Triton interprets them, which is slow.
"""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedsift.selection import masks

pytest.importorskip("triton", reason="Triton is not installed: there are no kernels to test")

from fedsift.selection import gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FINITE = st.floats(width=32, allow_nan=False)
FEW = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, -1e-45, 1e-40, 3e38, -float("inf")])


def matrices(longest: int):
    shapes = st.tuples(st.integers(1, 3), st.integers(1, longest))
    return shapes.flatmap(lambda shape: arrays(np.float32, shape, elements=FEW | FINITE))


def by_order(x: torch.Tensor, k: int) -> torch.Tensor:
    return masks._top_k_by_order(x.cpu().abs(), k)


def same(x: torch.Tensor, k: int, choose=gpu.top_k) -> None:
    x = x.to(DEVICE)
    chosen = choose(x, k)
    assert chosen.dtype == torch.bool
    assert torch.equal(chosen.cpu(), by_order(x, k))


@settings(max_examples=20)
@given(matrices(40), st.data())
@example(np.zeros((2, 33), np.float32), None)
def test_short_rows(x, data):
    k = data.draw(st.integers(1, x.shape[1])) if data else 7
    same(torch.from_numpy(x), k, gpu.short_top_k)


@pytest.mark.parametrize("d", [1000, 21_840, gpu.MAX_SHORT_ROW])
@pytest.mark.parametrize("decimals", [0, 9])
def test_short_rows_of_many_warps(d, decimals):
    x = torch.randn(2, d, generator=torch.Generator().manual_seed(0)).round(decimals=decimals)
    for k in (1, masks.num_kept(0.05, d), d - 3, d):
        same(x, k, gpu.short_top_k)
        chosen = by_order(x, k)
        found = gpu.positions(chosen.to(DEVICE), k)
        assert torch.equal(found.cpu(), masks.positions(chosen))


@settings(max_examples=12)
@given(matrices(40), st.data())
@example(np.zeros((2, 33), np.float32), None)
def test_long_rows(x, data):
    k = data.draw(st.integers(1, x.shape[1])) if data else 7
    same(torch.from_numpy(x), k, gpu.long_top_k)


@pytest.mark.parametrize("density", [1e-9, 0.05, 0.5, 1.0])
@pytest.mark.parametrize("decimals", [0, 1, 9])
def test_rows_of_several_blocks_with_many_ties(density, decimals):
    x = torch.randn(2, 9001, generator=torch.Generator().manual_seed(0)).round(decimals=decimals)
    same(x, masks.num_kept(density, 9001), gpu.long_top_k)


@settings(max_examples=12)
@given(st.integers(0, 2**31 - 1), st.integers(0, 20), st.integers(1, 500))
@example(2**31 - 1, 0, 1)
@example(0, 0, 500)
def test_the_kth_magnitude_is_found_from_any_guess(low, shift, k):
    x = torch.randn(1, 500, generator=torch.Generator().manual_seed(k)) ** 5
    guess = torch.tensor([[low, shift, 0]], dtype=torch.int32, device=DEVICE)
    kth, state, room = gpu.find_kth(x.to(DEVICE), k, guess)[0].tolist()
    ordered = x[0].abs().sort(descending=True).values
    assert state == -1
    assert kth == int(ordered[k - 1].view(torch.int32))
    assert room == k - int((x.abs() > ordered[k - 1]).sum())


def test_the_guessed_span_contains_the_kth_magnitude(monkeypatch):
    monkeypatch.setattr(gpu, "_SAMPLE_SIZE", 1 << 10)
    x = torch.randn(3, 30_000, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for k in (1, 300, 1500, 29_000, 30_000):
        kth = x.abs().sort(-1, descending=True).values[:, k - 1].view(torch.int32)
        low, shift, _ = gpu.guess_spans(x, k).unbind(-1)
        assert ((low <= kth) & (kth.long() < low.long() + (2048 << shift.long()))).all()


def test_inputs_of_any_layout():
    x = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0))
    same(x, 5)
    same(x[:, 1, 3:40], 5)
    same(x[:, :, ::2], 5)
    same(x[0, 0], 5)


def test_rows_at_the_length_limit(monkeypatch):
    monkeypatch.setattr(gpu, "MAX_SHORT_ROW", 64)
    monkeypatch.setattr(gpu, "_MAX_ROWS", 2)
    for d in (64, 65):
        same(torch.arange(3.0 * d).view(3, d) % 7, 20)


@settings(max_examples=20)
@given(arrays(np.bool_, st.tuples(st.integers(1, 3), st.integers(1, 60))), st.booleans())
def test_positions_of_ones(ones, in_blocks):
    k = int(ones.sum(-1).min())
    ones &= np.cumsum(ones, -1) <= k
    expected = np.nonzero(ones)[1].reshape(len(ones), k)
    with pytest.MonkeyPatch.context() as patch:
        if in_blocks:
            patch.setattr(gpu, "MAX_SHORT_ROW", 8)
            patch.setattr(gpu, "_BLOCK", 16)
        found = gpu.positions(torch.from_numpy(ones).to(DEVICE), k)
    assert np.array_equal(found.cpu().numpy(), expected)


@pytest.mark.parametrize("rows", [1, 3])
def test_differences_at_indices(rows):
    draw = torch.Generator().manual_seed(0)
    x, since = torch.randn(rows, 3000, generator=draw), torch.randn(3000, generator=draw)
    k = 1500
    indices = masks.positions(masks.top_k(x, k), k)
    since = since.expand(rows, -1)
    found = gpu.difference_at(*(each.to(DEVICE) for each in (indices, x, since)))
    assert torch.equal(found.cpu(), (x - since).gather(-1, indices))


def test_masks_uses_the_kernels_if_they_can_run(monkeypatch):
    mask = torch.tensor([[False, True, True], [True, False, True]], device=DEVICE)
    monkeypatch.setattr(masks, "can_use_triton", lambda x: True)
    assert masks.positions(mask, 2).tolist() == [[1, 2], [0, 2]]

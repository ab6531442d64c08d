"""Top-k selection on a CPU equals a stable sort on any input."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedsift.selection.cpu import _DIRECT, top_k_mask


def top_k_indices(x: torch.Tensor, k: int) -> torch.Tensor:
    return top_k_mask(x, k).nonzero()[:, 0]


def expected(x: torch.Tensor, k: int) -> torch.Tensor:
    order = torch.sort(x, descending=True, stable=True).indices[:k]
    return torch.sort(order).values


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_small_vectors_match_a_stable_sort(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([np.float32, np.float64]))
    few = st.sampled_from([0.0, 1e-45, 1e-40, 0.5, 1.0, float("inf")])
    any_float = st.floats(0, float("inf"), width=32 if dtype is np.float32 else 64)
    values = data.draw(hnp.arrays(dtype, st.integers(1, 60), elements=few | any_float))
    k = data.draw(st.integers(0, values.size))
    x = torch.from_numpy(values)
    assert torch.equal(top_k_indices(x, k), expected(x, k))


D = 4 * _DIRECT + 3
SHAPES = {
    "random": lambda: torch.randn(D).abs(),
    "float64": lambda: torch.randn(D, dtype=torch.float64).abs(),
    "all equal": lambda: torch.full((D,), 0.25),
    "ascending": lambda: torch.arange(D).float(),
    "descending": lambda: torch.arange(D).float().flip(0),
    "nearly all zero": lambda: torch.rand(D) * (torch.rand(D) < 1e-3),
    "half zero": lambda: torch.rand(D) * (torch.rand(D) < 0.5),
    "subnormal": lambda: torch.randint(0, 1000, (D,)).float() * 1.4e-45,
    "few levels": lambda: torch.randint(0, 5, (D,)).float(),
    "periodic": lambda: (torch.arange(D) % 8 == 0).float() * torch.rand(D),
    "one spike": lambda: torch.zeros(D).index_fill_(0, torch.tensor([D - 1]), 9.0),
    "infinities": lambda: torch.rand(D).masked_fill_(torch.rand(D) < 0.01, float("inf")),
    "heavy tail": lambda: torch.randn(D).abs() ** 20,
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("k", [1, 2, 17, D // 1000, D // 20, D // 2, D - 5, D - 1, D])
def test_large_vectors_match_a_stable_sort(name: str, k: int) -> None:
    torch.manual_seed(0)
    x = SHAPES[name]()
    assert torch.equal(top_k_indices(x, k), expected(x, k))


@pytest.mark.parametrize("flush", [False, True])
def test_subnormals_keep_their_order_where_the_processor_flushes_them(flush: bool) -> None:
    x = torch.tensor([1, 3, 2, 0], dtype=torch.int32).view(torch.float32)
    torch.set_flush_denormal(flush)
    try:
        assert top_k_indices(x, 2).tolist() == [1, 2]
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), -1.0, -float("inf")])
@pytest.mark.parametrize("d", [5, D])
def test_nan_and_negative_values_are_refused(bad: float, d: int) -> None:
    x = torch.rand(d)
    x[d // 2] = bad
    for k in (0, 1, d):
        with pytest.raises(ValueError, match="non-negative and not NaN"):
            top_k_indices(x, k)


def test_negative_zero_is_zero() -> None:
    assert top_k_indices(torch.tensor([-0.0, 0.0, -0.0, 1.0]), 2).tolist() == [0, 3]


@pytest.mark.parametrize("k", [-1, 4])
def test_an_invalid_k_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match="k must be in"):
        top_k_indices(torch.ones(3), k)


def test_other_inputs_than_float_vectors_are_refused() -> None:
    for x in (torch.ones(2, 2), torch.ones(3, dtype=torch.int32), torch.ones(3).half()):
        with pytest.raises(ValueError, match="vector"):
            top_k_indices(x, 1)


def test_strided_input_is_accepted_and_not_modified() -> None:
    x = torch.rand(200)
    before = x.clone()
    assert torch.equal(top_k_indices(x[::2], 7), expected(x[::2], 7))
    assert torch.equal(x, before)


def test_faster_than_torch_topk() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x = torch.randn(3_000_000).abs()
        k = x.numel() // 20

        def best(call: object) -> float:
            times = []
            for _ in range(4):
                start = time.perf_counter()
                call()  # type: ignore[operator]
                times.append(time.perf_counter() - start)
            return min(times)

        ratio = best(lambda: torch.topk(x, k)) / best(lambda: top_k_mask(x, k))
    finally:
        torch.set_num_threads(threads)
    assert ratio > 2, f"only {ratio:.1f} times faster"  # 8 on a quiet machine; see benchmarks/

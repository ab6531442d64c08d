"""Value coders: error bounds, exact sizes, bit-identical round trips, and hostile bytes."""

import struct
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedsift.codec.errors import FrameError
from fedsift.codec.update import CodedValues
from fedsift.codec.values import (
    OWN_IDS,
    VALUE_CODERS,
    Bit,
    BlockCoder,
    Float,
    Integer,
    Linear,
    Log,
    Means,
    Quantized,
    Sign,
    ValueCoder,
    from_wire_id,
    lossless,
)

EVERY = [
    *VALUE_CODERS.values(),
    *(kind(bits, block) for kind in (Linear, Log) for bits in (2, 5, 8) for block in (None, 4)),
    Linear(4, stochastic=True),
    Means(4),
]
BY_NAME = pytest.mark.parametrize("coder", EVERY, ids=repr)
DTYPES: dict[type[np.floating[Any]], Literal[32, 64]] = {np.float32: 32, np.float64: 64}


@st.composite
def vectors(draw: st.DrawFn) -> torch.Tensor:
    """Vectors of any length and any finite magnitude, with zeros, ties and subnormal numbers."""
    dtype = draw(st.sampled_from(list(DTYPES)))
    bound = float(np.float32(draw(st.sampled_from([1e-44, 1e-38, 1.0, 1e4, 3e38]))))
    special = st.sampled_from([0.0, -0.0, bound, -bound, 1e-45, bound / 2])
    anything = st.floats(-bound, bound, width=DTYPES[dtype])
    elements = special.map(dtype) | anything.map(dtype)
    return torch.from_numpy(draw(hnp.arrays(dtype, st.integers(0, 40), elements=elements)))


def exact_size(coder: ValueCoder, codes: Quantized) -> int:
    scales = None if codes.scales is None else codes.scales[None]
    return int(CodedValues(coder, Quantized(codes.codes[None], scales), torch.float32).sizes)


@BY_NAME
@settings(max_examples=60, deadline=None)
@given(x=vectors())
def test_round_trip_size_and_error(coder: ValueCoder, x: torch.Tensor) -> None:
    n = len(x)
    codes = coder.quantize(x)
    payload = coder.pack(codes)
    assert len(payload) == exact_size(coder, codes) <= coder.size(n)
    unpacked = coder.unpack(payload, n)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        sent, received = coder.restore(codes, dtype), coder.restore(unpacked, dtype)
        assert sent.dtype == received.dtype == dtype
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        assert torch.equal(sent.view(bits), received.view(bits))
    restored = coder.restore(codes, x.dtype)
    assert torch.isfinite(restored).all()
    assert (restored.double() - x.double()).abs().le(coder.error_bound(x).double()).all()
    assert coder.pack(unpacked) == payload


@BY_NAME
def test_clients_are_independent(coder: ValueCoder) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 700) * torch.tensor([1.0, 1e-6, 1e3])[:, None]
    if getattr(coder, "stochastic", False):
        coder = replace(coder, stochastic=False)  # type: ignore[type-var]
    codes = coder.quantize(x)
    stacked = coder.restore(codes, torch.float32)
    assert stacked.shape == x.shape
    assert coder.error_bound(x).shape == x.shape
    for i in range(2):
        for j in range(3):
            alone = coder.restore(coder.quantize(x[i, j]), torch.float32)
            assert torch.equal(stacked[i, j], alone)


@BY_NAME
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_values_are_refused(coder: ValueCoder, bad: float) -> None:
    x = torch.ones(300)
    x[299] = bad
    with pytest.raises(ValueError, match="finite"):
        coder.quantize(x)


def test_scales_must_fit_float32() -> None:
    for coder in (Linear(8), Log(8), Sign()):
        with pytest.raises(ValueError, match="finite"):
            coder.quantize(torch.tensor([1e39], dtype=torch.float64))


@BY_NAME
def test_zeros_are_restored_as_zeros(coder: ValueCoder) -> None:
    if isinstance(coder, Bit):
        return  # it has no zero
    x = torch.zeros(5)
    assert torch.equal(coder.restore(coder.unpack(coder.pack(coder.quantize(x)), 5), x.dtype), x)
    if not isinstance(coder, Sign):
        x[2] = 1.0 if isinstance(coder, Integer) else 3.0
        assert torch.equal(coder.restore(coder.quantize(x), x.dtype), x)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_floats_saturate(name: str) -> None:
    coder = Float(name)
    largest = torch.finfo(getattr(torch, name)).max
    x = torch.tensor([1e300, -1e300, largest], dtype=torch.float64)
    restored = coder.restore(coder.quantize(x), torch.float64)
    assert restored.tolist() == [largest, -largest, largest]
    assert (restored - x).abs().le(coder.error_bound(x)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_lossless_coders_keep_every_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(100, dtype=torch.float64).to(dtype)
    coder = lossless(dtype)
    assert torch.equal(coder.restore(coder.unpack(coder.pack(coder.quantize(x)), 100), dtype), x)
    assert not coder.error_bound(torch.zeros(3)).gt(1e-7).any()


@given(x=vectors(), weights=st.lists(st.integers(1, 64), min_size=3, max_size=3))
def test_sums_of_whole_numbers_are_exact_in_any_order(x: torch.Tensor, weights: list[int]) -> None:
    coder = Integer(4)
    stack = torch.stack([x, -x / 3, x + 1]).to(torch.float32)
    restored = coder.restore(coder.quantize(stack), torch.float32)
    terms = restored * torch.tensor(weights)[:, None]
    assert torch.equal(terms[0] + terms[1] + terms[2], terms[2] + terms[1] + terms[0])
    assert torch.equal(terms.sum(0), terms.double().sum(0).float())
    assert restored.abs().le(coder.largest).all()


def test_linear_rounds_half_to_even() -> None:
    x = torch.tensor([7.0, 0.5, 1.5, 2.5, -0.5, -1.5, 3.49])
    assert Linear(4).quantize(x).codes.tolist() == [7, 0, 2, 2, 0, -2, 3]
    assert Integer(4).quantize(x).codes.tolist() == [7, 0, 2, 2, 0, -2, 3]


def test_linear_blocks_have_their_own_scales() -> None:
    x = torch.cat([torch.full((256,), 100.0), torch.full((10,), 0.01)])
    codes = Linear(2).quantize(x)
    assert codes.scales is not None
    assert codes.scales.tolist() == [100.0, pytest.approx(0.01)]
    assert torch.equal(Linear(2).restore(codes, torch.float32), x)


def test_stochastic_rounding_is_unbiased_and_seeded() -> None:
    coder = Linear(4, stochastic=True)
    x = torch.tensor([7.0, 0.3, -2.6, 5.99, 0.0])

    def draw(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return coder.restore(coder.quantize(x.expand(20_000, 5), generator), torch.float32)

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    assert torch.allclose(draw(1).mean(0), x, atol=0.02)
    assert draw(1)[:, 0].eq(7).all()
    assert draw(1)[:, 4].eq(0).all()
    assert (draw(1) - x).abs().le(coder.error_bound(x)).all()


def test_sign_has_the_norm() -> None:
    x = torch.tensor([[3.0, -4.0], [0.0, 0.0], [-1e30, 1e30]])
    restored = Sign().restore(Sign().quantize(x), torch.float64)
    assert restored[0].tolist() == pytest.approx([12.5**0.5, -(12.5**0.5)], rel=1e-6)
    assert restored.norm(dim=-1).tolist() == pytest.approx(x.double().norm(dim=-1).tolist())


def test_log_codes_are_accurate_over_their_octaves() -> None:
    x = torch.logspace(0, -2 * 7, 500, base=2)
    for bits in range(4, 9):
        part = x[x >= 2.0 ** (-2 * (bits - 1))]
        ratio = 2 ** (2 * (bits - 1) / (2 ** (bits - 1) - 2))
        relative = (
            Log(bits, None).restore(Log(bits, None).quantize(part), part.dtype) / part - 1
        ).abs()
        assert relative.max() <= (ratio - 1) / (ratio + 1) + 1e-6


def test_log_has_smaller_relative_errors_than_linear_on_many_magnitudes() -> None:
    torch.manual_seed(0)
    v = torch.randn(100_000).exp()
    for bits in (4, 6, 8):
        log, linear = (c.restore(c.quantize(v), v.dtype) for c in (Log(bits), Linear(bits)))
        assert ((log - v) / v).abs().mean() < 0.5 * ((linear - v) / v).abs().mean()


@pytest.mark.parametrize(("bits", "block"), [(1, 256), (9, 256), (4, 1), (4, 3), (4, 0)])
def test_invalid_bits_and_blocks_are_refused(bits: int, block: int) -> None:
    for kind in (Linear, Log):
        with pytest.raises(ValueError, match=r"bits|block"):
            kind(bits, block)


def test_only_float_types_have_a_lossless_coder() -> None:
    with pytest.raises(ValueError, match="int32"):
        lossless(torch.int32)


def test_pack_takes_one_client() -> None:
    x = torch.ones(2, 3)
    for coder in (Sign(), Linear(4)):
        with pytest.raises(ValueError, match="one client"):
            coder.pack(coder.quantize(x))
        with pytest.raises(ValueError, match="scales"):
            coder.restore(Quantized(torch.ones(3, dtype=torch.int8)), torch.float32)


def test_wire_ids() -> None:
    assert len({coder.wire_id for coder in VALUE_CODERS.values()}) == len(VALUE_CODERS)
    wide = (
        *(kind(float64_scales=True) for kind in (Sign, Means)),
        *(kind(4, float64_scales=True) for kind in (Linear, Log)),
    )
    for coder in (*VALUE_CODERS.values(), Linear(3, None), Log(7, 2**31), Means(2), *wide):
        assert 0 < coder.wire_id < 2**16
        assert from_wire_id(coder.wire_id) == coder
    known = {coder.wire_id % 256 for coder in (*VALUE_CODERS.values(), *wide)}
    known |= {0x80 | bits | kind for bits in range(2, 9) for kind in (0x10, 0x20)} | {*OWN_IDS}
    unknown = {
        7,
        OWN_IDS[-1],
        OWN_IDS[0] + 0x80,
        OWN_IDS[0] + 0x100,
        0x0102,
        0x0105,
        0x0834,
        0x2007,
        0x2014,
        0xFF24,
        2**16,
        -1,
    }
    for wire_id in (set(range(256)) - known) | unknown:
        with pytest.raises(FrameError, match="unknown"):
            from_wire_id(wire_id)


def test_layout_of_the_bytes() -> None:
    """The payloads of the specification, byte by byte."""
    x = torch.tensor([1.0, -0.5, 0.0])
    expected = {
        "float32": "0000803f000000bf00000000",
        "bfloat16": "803f00bf0000",
        "float16": "003c00b80000",
        "int8": "0000803f" + "7fc000",  # 127; -64 = 0x80 | 64; 0
        "int4": "0000803f" + "c700",  # 7, 8 | 4; 0
        "int2": "0000803f" + "01",  # 1; -0.5 rounds to 0; 0
        "whole4": "0100",  # 1; -0.5 rounds to 0; 0
        "log3": "0000803f" + "3300",  # 3; 4 | 2, as 0.25 is nearer than 1; 0
        "sign": struct.pack("<f", (1.25 / 3) ** 0.5).hex() + "02",
        "bit": "02",
        "means": struct.pack("<4f", 0.0, -0.5, 0.0, 1.0).hex() + "27",  # 3; 1; 2
    }
    found = {
        name: VALUE_CODERS[name].pack(VALUE_CODERS[name].quantize(x)).hex() for name in expected
    }
    assert found == expected


LINEAR = [Linear(bits, float64_scales=wide) for bits in range(2, 9) for wide in (False, True)]


@pytest.mark.parametrize("coder", LINEAR, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_largest_number_is_restored_as_a_finite_number(
    coder: Linear, dtype: torch.dtype
) -> None:
    largest = torch.finfo(torch.float64 if coder.float64_scales else torch.float32).max
    if largest > torch.finfo(dtype).max:
        return
    x = torch.tensor([largest, -largest, 0.0], dtype=dtype)
    restored = coder.restore(coder.quantize(x), dtype)
    assert restored.isfinite().all()
    assert (restored - x).abs().le(coder.error_bound(x)).all()


@pytest.mark.parametrize("value", [70_000.0, -70_000.0])
def test_bfloat16_values_beyond_float16_saturate(value: float) -> None:
    coder = Float("float16")
    x = torch.tensor([value], dtype=torch.bfloat16)
    restored = coder.restore(coder.quantize(x), torch.float32)
    assert restored.tolist() == [np.copysign(65_504.0, value)]
    assert (restored - x.float()).abs().le(coder.error_bound(x)).all()


class LargestTensor(TorchDispatchMode):
    """Record the number of elements of the largest result."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.parametrize("kind", [Linear, Log])
def test_a_block_longer_than_the_values_needs_no_more_memory(kind: type[BlockCoder]) -> None:
    """Meta tensors take no memory, so the test is safe even if it fails."""
    coder = kind(4, 2**31)
    with LargestTensor() as largest:
        codes = coder.quantize(torch.empty(5, device="meta"))
        coder.restore(codes, torch.float32)
    assert largest.numel < 100


@BY_NAME
def test_no_step_synchronizes_with_the_host(coder: ValueCoder) -> None:
    """A meta tensor has no data: any step that reads a value on the host fails."""
    x = torch.empty(3, 2, 700, device="meta")
    codes = coder.quantize(x)
    assert codes.codes.shape == x.shape
    assert coder.restore(codes, torch.float32).shape == x.shape
    assert coder.error_bound(x).shape == x.shape


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@BY_NAME
def test_a_gpu_restores_the_same_values(coder: ValueCoder) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 1000)
    if getattr(coder, "stochastic", False):
        return
    torch.cuda.set_sync_debug_mode("default")
    coder.quantize(x.cuda())  # the first call may build a table
    on_gpu = x.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        codes = coder.quantize(on_gpu)
        restored = coder.restore(codes, torch.float32)
        coder.error_bound(on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    scales = None if codes.scales is None else codes.scales.cpu()
    assert torch.equal(
        restored.cpu(), coder.restore(Quantized(codes.codes.cpu(), scales), torch.float32)
    )
    close = coder.restore(coder.quantize(x), torch.float32)
    assert (restored.cpu() - close).abs().le(2 * coder.error_bound(x)).all()

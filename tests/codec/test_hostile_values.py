"""Hostile bytes of values are refused, and decoded values are within the limits."""

import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from codec.test_values import BY_NAME
from fedsift.codec import Limits, Spec, Update, decode, encode
from fedsift.codec.errors import FrameError
from fedsift.codec.update import CodedValues, Part
from fedsift.codec.values import (
    Bit,
    BlockCoder,
    Float,
    Integer,
    Linear,
    Log,
    Means,
    Sign,
    ValueCoder,
)
from fedsift.vector import Layout

LAYOUT = Layout.of(nn.Linear(3, 2))


@BY_NAME
@settings(max_examples=60, deadline=None)
@given(payload=st.binary(max_size=40), n=st.integers(0, 12))
def test_random_bytes(coder: ValueCoder, payload: bytes, n: int) -> None:
    try:
        codes = coder.unpack(payload[: coder.size(n)], n)
    except FrameError:
        return
    restored = coder.restore(codes, torch.float64)
    assert len(restored) == n
    assert restored.isfinite().all()
    if len(payload) >= coder.size(n):  # bit-packed codes have a single form, tables do not
        packed = payload[: coder.size(n)]
        assert coder.pack(codes) == packed or len(coder.pack(codes)) < len(packed)


@BY_NAME
def test_a_changed_length_is_refused_or_gives_other_values(coder: ValueCoder) -> None:
    """A shorter code can be the valid code of other values, if its length matches theirs."""
    torch.manual_seed(0)
    codes = coder.quantize(torch.randn(300))
    payload = coder.pack(codes)
    for changed in (payload[:-1], payload + b"\0", b""):
        try:
            other = coder.unpack(changed, 300)
        except FrameError:
            continue
        assert isinstance(coder, BlockCoder)
        assert not torch.equal(other.codes, codes.codes)
    if not isinstance(coder, BlockCoder) or coder.block:  # a single code in use takes no bytes
        with pytest.raises(FrameError, match="length"):
            coder.unpack(payload, 2**60)


@BY_NAME
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, -0.0])
def test_scales_and_values_are_checked(coder: ValueCoder, bad: float) -> None:
    payload = coder.pack(coder.quantize(torch.ones(20)))
    if isinstance(coder, Bit | Integer):
        return  # it has no scale, and all its values are valid
    if isinstance(coder, Float):
        if bad <= 0:
            return
        first = torch.tensor([bad], dtype=torch.float64).to(getattr(torch, coder.name))
        head = first.view(torch.uint8).numpy().tobytes()
    else:
        if isinstance(coder, Means) and bad <= 0:
            return
        head = struct.pack("<f", bad)
    with pytest.raises(FrameError, match=r"not finite|negative"):
        coder.unpack(head + payload[len(head) :], 20)


@BY_NAME
def test_a_decoded_value_is_at_most_max_abs(coder: ValueCoder) -> None:
    x = torch.full((1, LAYOUT.d), 1e3)
    frame = encode(Update((Part(None, {"w": CodedValues.of(x, coder)}),), (1.0,)), Spec(LAYOUT))
    largest = float(decode(frame, LAYOUT).parts[0].values["w"].restore().abs().max())
    decode(frame, LAYOUT, Limits(max_abs=largest))
    with pytest.raises(FrameError, match="a value is not finite or above"):
        decode(frame, LAYOUT, Limits(max_abs=np.nextafter(largest, 0)))


def test_a_linear_value_rounded_above_max_abs_is_refused() -> None:
    layout = Layout.of(nn.Linear(3, 2, dtype=torch.float64))
    coder = Linear(8, float64_scales=True)
    scales = 1 + torch.rand(1000, dtype=torch.float64)
    scale = next(s for s in scales if 127 * (s / 127) > s)
    x = scale.expand(1, layout.d)
    frame = encode(Update((Part(None, {"w": CodedValues.of(x, coder)}),), (1.0,)), Spec(layout))
    assert decode(frame, layout).parts[0].values["w"].restore().max() > scale
    with pytest.raises(FrameError, match="above"):
        decode(frame, layout, Limits(max_abs=float(scale)))


def test_unused_codes_and_padding() -> None:
    scale = struct.pack("<f", 1.0)
    for kind in (Linear, Log):
        for bits in range(2, 9):
            with pytest.raises(FrameError, match="unused"):
                kind(bits).unpack(scale + bytes([1 << (bits - 1)]), 1)
    cases: list[tuple[ValueCoder, int]] = [
        (Sign(), 3),
        (Linear(2), 3),
        (Linear(4), 1),
        (Log(3), 2),
        (Log(5), 1),
    ]
    for coder, n in cases:
        size = coder.size(n)
        with pytest.raises(FrameError, match="padding"):
            coder.unpack(scale + bytes(size - 5) + b"\x80", n)

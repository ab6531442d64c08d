"""Entropy-coded values: exact sizes near the entropy, and refusal of hostile bytes."""

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codec.test_index import reference_weights
from fedsift.codec import value_entropy
from fedsift.codec.errors import FrameError
from fedsift.codec.value_blocks import BlockCoder, Linear, Log
from fedsift.codec.value_coder import Quantized
from fedsift.codec.value_entropy import (
    coded_sizes,
    count_codes,
    decode_codes,
    encode_codes,
    to_unsigned,
)

ANY = 1 << 40


def entropy(codes: np.ndarray) -> float:
    """Return the bytes at the information limit, without the table."""
    counts = np.unique(codes, return_counts=True)[1]
    return float(-(counts * np.log2(counts / counts.sum())).sum() / 8)


def written(codes: np.ndarray, bits: int) -> bytes:
    """Return the codes' bytes, after checking the round trip and the size."""
    stack = torch.from_numpy(codes)[None]
    raw = to_unsigned(stack[0], bits).numpy().astype(np.uint8)
    payload = encode_codes(raw, bits, ANY)
    assert payload is not None
    assert [len(payload)] == coded_sizes(count_codes(stack, bits)).tolist()
    assert np.array_equal(decode_codes(payload, len(raw), bits), raw)
    return payload


def drawn(n: int, bits: int, spread: float, seed: int = 0) -> np.ndarray:
    top = 2 ** (bits - 1) - 1
    x = np.random.default_rng(seed).standard_normal(n) * spread
    return np.clip(np.round(x), -top, top).astype(np.int8)


@st.composite
def codes(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """Draw codes of any width: uniform ones, or mostly one code."""
    bits = draw(st.integers(2, 8))
    top = 2 ** (bits - 1) - 1
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    chosen = rng.integers(-top, top + 1, draw(st.integers(1, 20)))
    rare = draw(st.sampled_from([0.0, 0.001, 0.1, 1.0]))
    n = draw(st.integers(1, 50) | st.integers(50, 5000))
    picked = np.where(rng.random(n) < rare, rng.choice(chosen, n), chosen[0])
    return picked.astype(np.int8), bits


@settings(max_examples=300, deadline=None)
@given(case=codes())
def test_round_trip_and_exact_size(case: tuple[np.ndarray, int]) -> None:
    written(*case)


@pytest.mark.parametrize("n", [0, 1, 2, 16_384, 16_385, 100_000])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_any_number_of_codes(n: int, bits: int) -> None:
    if n:
        written(drawn(n, bits, 2.0), bits)
    assert coded_sizes(count_codes(torch.zeros(3, n, dtype=torch.int8), bits)).shape == (3,)


@pytest.mark.parametrize("spread", [0.3, 0.6, 1.0, 2.0, 3.0])
def test_the_size_is_near_the_entropy(spread: float) -> None:
    """The excess is a small table and 2 bytes for 200 values of 4 bits, 0.3 % for 100,000."""
    few, many = drawn(200, 4, spread), drawn(100_000, 4, spread)
    assert len(written(few, 4)) <= entropy(few) + 2 + len(np.unique(few)) / 2 + 2
    assert len(written(many, 4)) <= 1.003 * entropy(many) + 20


def test_likely_symbols_stay_within_the_size() -> None:
    """The range coder loses most if nearly all codes are equal."""
    for rare in (1, 3, 50, 5000):
        many = np.zeros(100_000, np.int8)
        many[:rare] = 1
        written(many, 4)
        written(np.random.default_rng(rare).permutation(many), 4)


def test_a_single_code_takes_only_its_table() -> None:
    assert written(np.full(10_000, -3, np.int8), 4).hex() == "0008"
    assert written(np.zeros(10_000, np.int8), 2).hex() == "01"


@pytest.mark.parametrize("kind", [Linear, Log])
@pytest.mark.parametrize("bits", range(2, 9))
def test_the_shorter_form_is_chosen(kind: type[BlockCoder], bits: int) -> None:
    coder = kind(bits)
    even = torch.arange(-coder._top_level, coder._top_level + 1, dtype=torch.int8).repeat(3)
    for all_codes in (even, torch.ones(300, dtype=torch.int8)):
        n = len(all_codes)
        packed = Quantized(all_codes, torch.ones(-(-n // 256)))
        payload = coder.pack(packed)
        assert (len(payload) == coder.size(n)) == (all_codes is even)
        assert torch.equal(coder.unpack(payload, n).codes, all_codes)


def test_the_sizes_of_a_stack_are_those_of_its_rows() -> None:
    stack = torch.from_numpy(np.stack([drawn(999, 4, s) for s in (0.1, 0.5, 2.0, 9.0)]))
    sizes = coded_sizes(count_codes(stack, 4)).tolist()
    assert sizes == [len(written(row.numpy(), 4)) for row in stack]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("piece", [256, 1 << 20])
def test_counting_on_a_device_gives_the_same(
    bits: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(value_entropy, "_CHUNK", piece)
    for n in (0, 1, 63, 64, 1000):
        stack = torch.from_numpy(np.stack([drawn(n, bits, s) for s in (0.5, 30.0)]))
        assert torch.equal(value_entropy._count_on_device(stack, bits), count_codes(stack, bits))


@pytest.mark.parametrize("coder", [Linear(4), Log(4), Linear(8, None)], ids=repr)
def test_sizes_do_not_synchronize_with_the_host(coder: BlockCoder) -> None:
    """A meta tensor has no data: any step that reads a value on the host fails."""
    held = Quantized(torch.empty(3, 700, dtype=torch.int8, device="meta"))
    assert coder.sizes(held).shape == (3,)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_sizes_are_the_same_on_a_gpu() -> None:
    stack = torch.from_numpy(np.stack([drawn(5000, 4, s) for s in (0.1, 0.5, 2.0, 9.0)]))
    on_gpu = stack.cuda()
    coder = Linear(4)
    coder.sizes(Quantized(on_gpu))  # the first call compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        first, second = coder.sizes(Quantized(on_gpu)), coder.sizes(Quantized(on_gpu.flip(0)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert first.tolist() == coder.sizes(Quantized(stack)).tolist() == second.tolist()[::-1]


# The specification, as a reference implementation that shares no code with the coder.


def reference_read(payload: bytes, n: int, bits: int) -> list[int]:
    """Decode with integers: the code is a fraction of a range that each symbol narrows."""
    row = [octet >> i & 1 for octet in payload for i in range(8)]
    codes = [code for code in range(2**bits) if row[code] and code != 2 ** (bits - 1)]
    width = 8 if row[2 ** (bits - 1)] else 4
    if len(codes) == 1:
        return codes * n
    end = 2**bits + width * len(codes)
    at = range(2**bits, end, width)
    listed = [sum(bit << i for i, bit in enumerate(row[a : a + width])) for a in at]
    weights = reference_weights(listed if width == 8 else [132 + 4 * v for v in listed])
    code = payload[-(-end // 8) :]
    value, rng = int.from_bytes(code[:8].ljust(8, b"\0"), "big"), 2**64 - 1
    rest, found = iter(code[8:]), []
    for _ in range(n):
        step, left, i = rng >> 24, 0, 0
        while step * (left + weights[i]) <= value:
            left, i = left + weights[i], i + 1
        value, rng = value - step * left, step * weights[i]
        found.append(codes[i])
        if rng < 2**32:
            word = sum(next(rest, 0) << shift for shift in (24, 16, 8, 0))
            value, rng = value << 32 | word, rng << 32
    return found


@settings(deadline=None)
@given(case=codes())
def test_the_bytes_follow_the_specification(case: tuple[np.ndarray, int]) -> None:
    raw = to_unsigned(torch.from_numpy(case[0]), case[1]).tolist()
    assert reference_read(written(*case), len(raw), case[1]) == raw


# Hostile bytes.


@settings(max_examples=300, deadline=None)
@given(case=codes(), data=st.data())
def test_changed_bytes_are_refused_or_give_valid_codes(
    case: tuple[np.ndarray, int], data: st.DataObject
):
    payload = bytearray(written(*case))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(payload)))
        payload[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    try:
        raw = decode_codes(bytes(payload), len(case[0]), case[1])
    except FrameError:
        return
    assert len(raw) == len(case[0])
    assert raw.max() < 2 ** case[1]
    assert not (raw == 2 ** (case[1] - 1)).any()


@settings(max_examples=300, deadline=None)
@given(payload=st.binary(max_size=40), n=st.integers(0, 100), bits=st.integers(2, 8))
def test_random_bytes(payload: bytes, n: int, bits: int) -> None:
    with contextlib.suppress(FrameError):
        assert len(decode_codes(payload, n, bits)) == n


def test_malformed_tables_are_refused() -> None:
    payload = written(drawn(300, 4, 2.0), 4)
    coarse = not payload[1] & 1
    assert coarse
    cases = {
        "no code in use": b"\0\0" + payload[2:],
        "truncated": payload[:3],
        "no bytes": b"",
        "a weight of zero": payload[:2] + b"\x0f" + payload[3:],
        "fine weights of a single code": b"\x02\x01",
        "bytes behind a single code": b"\x02\x00\x00",
        "a weight above the top": b"\x03\x01\xc1\xc0" + payload[4:],
        "padding": b"\x07\x00\xff\x1f" + payload[4:],
        "a byte less": payload[:-1],
        "a byte more": payload + b"\0",
    }
    for changed in cases.values():
        with pytest.raises(FrameError):
            decode_codes(changed, 300, 4)

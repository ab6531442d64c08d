"""Frames: lossless round trips, exact sizes, and refusal of hostile bytes."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedsift.codec import (
    Float,
    FrameError,
    Limits,
    Linear,
    Log,
    Sign,
    Spec,
    Update,
    decode,
    dense,
    encode,
    encoded_size,
    shape_of,
    sparse,
    state_hash,
)
from fedsift.codec.frame import encoded_sizes, frame_headers
from fedsift.codec.header import ByteReader, header_size, varint, write_header
from fedsift.selection.masks import top_k
from fedsift.vector import Layout, State

LAYOUT = Layout.of(nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 10)))
COMPACT = [Float("float32"), Float("bfloat16"), Float("float16"), Linear(8), Linear(4), Linear(2)]
COMPACT += [Sign(), Log(4), Log(6)]
SPEC = Spec(LAYOUT, "fedadam-ssm", round=7, client=3, run=b"run--id-", base=b"basehash")
EXPECTED = Limits(run=b"run--id-", round=7, base=b"basehash", algorithm="fedadam-ssm", client=3)


def shared(seed=0, k=50, coders=None, layout=LAYOUT, weight=64.0):
    draw = torch.Generator().manual_seed(seed)
    w, m, v = torch.randn(3, 1, layout.d, generator=draw, dtype=layout.dtype)
    return Update(sparse({"w": w, "m": m, "v": v.abs()}, top_k(w, k), coders), (weight,))


def same(one, other):
    assert shape_of(one) == shape_of(other)
    assert one.weights == other.weights
    for a, b in zip(one.parts, other.parts, strict=True):
        assert (a.indices is None) == (b.indices is None)
        assert a.indices is None or torch.equal(a.indices, b.indices)
        for role in a.values:
            assert torch.equal(a.values[role].restore(), b.values[role].restore())


@given(
    seed=st.integers(0, 2**32),
    k=st.integers(1, LAYOUT.d),
    coders=st.tuples(*[st.sampled_from(COMPACT)] * 3),
)
def test_a_decoded_frame_is_the_update_and_has_the_computed_size(seed, k, coders):
    update = shared(seed, k, dict(zip("wmv", coders, strict=True)))
    frame = encode(update, SPEC)
    assert len(frame) == encoded_size(update, SPEC)
    same(decode(frame, LAYOUT, replace(EXPECTED, shape=shape_of(update))), update)


@given(seed=st.integers(0, 2**32), coder=st.sampled_from(COMPACT))
def test_a_dense_update_needs_no_mask(seed, coder):
    x = torch.randn(1, LAYOUT.d, generator=torch.Generator().manual_seed(seed))
    update = Update(dense({"w": x}, coder), (1.0,))
    frame = encode(update, SPEC)
    assert len(frame) == encoded_size(update, SPEC)
    same(decode(frame, LAYOUT), update)


def test_the_order_of_the_roles_does_not_matter():
    draw = torch.Generator().manual_seed(0)
    w, m, v = torch.randn(3, 1, LAYOUT.d, generator=draw)
    mask = top_k(w, 50)
    by_mask = [sparse({"w": w, "m": m, "v": v}, mask), sparse({"v": v, "m": m, "w": w}, mask)]
    whole = [dense({"w": w, "m": m}), dense({"m": m, "w": w})]
    for straight, turned in (by_mask, whole):
        update = Update(turned, (64.0,))
        same(update, Update(straight, (64.0,)))
        same(decode(encode(update, SPEC), LAYOUT, EXPECTED), update)


def test_an_unknown_role_is_refused():
    with pytest.raises(ValueError, match="unknown roles"):
        dense({"x": torch.zeros(1, LAYOUT.d)})


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (lambda: Update(dense({"w": torch.zeros(1, 3)}), (1.0,)), "w has 3 coordinates"),
        (lambda: Update(dense({"w": torch.zeros(2, LAYOUT.d)}), (1.0, 1.0)), "one client's"),
    ],
)
def test_invalid_updates_are_not_encoded(update, message):
    with pytest.raises(ValueError, match=message):
        encode(update(), SPEC)


@pytest.mark.parametrize(
    "wrong",
    [
        {"run": b"abc"}, {"base": bytes(9)}, {"algorithm": "a" * 256}, {"algorithm": "é"},
        {"round": -1}, {"client": -1},
    ],
    ids=str,
)  # fmt: skip
def test_an_invalid_spec_is_refused(wrong):
    with pytest.raises(ValueError):  # noqa: PT011, each has words of its own
        Spec(LAYOUT, **wrong)


def test_decode_accepts_any_bytes_like_object():
    update = shared()
    frame = encode(update, SPEC)
    for kind in (bytearray, memoryview):
        same(decode(kind(frame), LAYOUT, EXPECTED), update)


def test_the_sizes_of_a_stack_are_those_of_its_clients():
    x = torch.randn(3, 4, LAYOUT.d)
    parts = sparse({"w": x[0], "m": x[1], "v": x[2]}, top_k(x[0], 30))
    update = Update(parts, (1.0, 2.0, 3.0, 4.0))
    specs = [replace(SPEC, client=100 * n) for n in range(4)]
    sizes = [len(encode(one, spec)) for one, spec in zip(update, specs, strict=True)]
    assert encoded_sizes(update, specs) == sizes


@given(
    st.integers(0, 2**64), st.integers(0, 2**64), st.integers(1, 700), st.sampled_from([1.0, 0.5])
)
def test_the_size_of_a_header_is_exact(round, client, k, weight):
    x = torch.arange(2.0 * LAYOUT.d).view(2, 1, -1)
    parts = (*sparse({"w": x[0], "m": x[1]}, top_k(x[0], k), {"w": Log(4)}), *dense({"v": x[1]}))
    spec = replace(SPEC, round=round, client=client)
    (header,) = frame_headers(Update(parts, (weight,)), [spec])
    assert header_size(header) == len(write_header(header))


def test_separate_masks_become_separate_parts():
    x = torch.randn(3, 1, LAYOUT.d)
    parts = [sparse({role: x[i]}, top_k(x[i], 20 + i))[0] for i, role in enumerate("wmv")]
    update = Update(tuple(parts), (2.0,))
    frame = encode(update, SPEC)
    assert len(frame) == encoded_size(update, SPEC)
    same(decode(frame, LAYOUT), update)


def test_float64_updates_are_lossless():
    layout = Layout.of(nn.Linear(5, 4, dtype=torch.float64))
    update = shared(layout=layout, k=7)
    same(decode(encode(update, Spec(layout)), layout), update)


def test_the_header_is_small():
    (header,) = frame_headers(shared(), [SPEC])
    assert len(write_header(header)) <= 60


def test_different_states_have_different_hashes():
    state = State(w=torch.ones(3), m=torch.zeros(3), v=torch.zeros(3))
    assert state_hash(state) == state_hash(state.map(torch.clone))
    assert state_hash(state) != state_hash(state.replace(v=torch.tensor([0, 0, 1e-45])))
    assert len(state_hash(state)) == 8


@given(st.integers(0, 2**64 - 1))
def test_varints_of_any_size(value):
    assert ByteReader(varint(value)).varint() == value


@pytest.mark.parametrize("raw", [b"\x80\x00", b"\xff" * 11, b"\x80", b""])
def test_a_malformed_varint_is_refused(raw):
    with pytest.raises(FrameError):
        ByteReader(raw).varint()


@given(st.floats(min_value=1e-300, max_value=1e300) | st.integers(1, 2**60).map(float))
def test_any_weight_is_lossless(weight):
    update = shared(weight=weight)
    frame = encode(update, SPEC)
    assert len(frame) == encoded_size(update, SPEC)
    assert decode(frame, LAYOUT, EXPECTED).weights == (weight,)


@pytest.mark.parametrize("clients", [1, 7])
def test_the_sizes_of_stacked_codes_are_those_of_their_clients(clients):
    draw = torch.Generator().manual_seed(clients)
    x = torch.randn(clients, LAYOUT.d, generator=draw) ** torch.arange(1, clients + 1)[:, None]
    coders = {"w": Linear(4), "v": Log(4)}
    for k in (1, 2, 30, 218, 700):
        update = Update(sparse({"w": x, "v": x.square()}, top_k(x, k), coders), (2.5,) * clients)
        specs = [replace(SPEC, client=300 * n) for n in range(clients)]
        frames = [encode(one, spec) for one, spec in zip(update, specs, strict=True)]
        assert encoded_sizes(update, specs) == [len(frame) for frame in frames]
        for one, frame, spec in zip(update, frames, specs, strict=True):
            same(decode(frame, LAYOUT, replace(EXPECTED, client=spec.client)), one)


def test_a_very_large_max_abs_is_accepted():
    frame = encode(Update(dense({"v": torch.ones(1, LAYOUT.d)}), (1.0,)), SPEC)
    assert decode(frame, LAYOUT, Limits(max_abs=1e200)).weights == (1.0,)


def test_stochastic_rounding_follows_its_generator():
    x = torch.randn(1, LAYOUT.d)
    coder = Linear(2, stochastic=True)

    def draw(seed):
        parts = dense({"w": x}, coder, torch.Generator().manual_seed(seed))
        return parts[0].values["w"].restore()

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))

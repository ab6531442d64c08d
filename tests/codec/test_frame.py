"""Frames: what goes in comes out with the size that was measured; hostile bytes are refused."""

import math
import struct
from dataclasses import replace

import numpy as np
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
from fedsift.codec.frame import checksum, encoded_sizes, headers_of, open_frame
from fedsift.codec.header import Reader, header_size, read_header, varint, write_header
from fedsift.codec.index import CODERS
from fedsift.selection.masks import top_k
from fedsift.vector import Layout, Moments

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
def test_what_goes_in_comes_out_and_has_the_size_that_was_measured(seed, k, coders):
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


def test_the_order_in_which_a_method_names_its_tensors_does_not_matter():
    draw = torch.Generator().manual_seed(0)
    w, m, v = torch.randn(3, 1, LAYOUT.d, generator=draw)
    mask = top_k(w, 50)
    by_mask = [sparse({"w": w, "m": m, "v": v}, mask), sparse({"v": v, "m": m, "w": w}, mask)]
    whole = [dense({"w": w, "m": m}), dense({"m": m, "w": w})]
    for straight, turned in (by_mask, whole):
        update = Update(turned, (64.0,))
        same(update, Update(straight, (64.0,)))
        same(decode(encode(update, SPEC), LAYOUT, EXPECTED), update)


def test_a_role_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="unknown roles"):
        dense({"x": torch.zeros(1, LAYOUT.d)})


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (lambda: Update(dense({"w": torch.zeros(1, 3)}), (1.0,)), "all .* coordinates"),
        (lambda: Update(dense({"w": torch.zeros(2, LAYOUT.d)}), (1.0, 1.0)), "one client's"),
    ],
)
def test_what_nobody_could_decode_is_not_encoded(update, message):
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
def test_a_header_that_cannot_be_written_is_refused(wrong):
    with pytest.raises(ValueError):  # noqa: PT011, each has words of its own
        Spec(LAYOUT, **wrong)


def test_a_frame_may_come_as_any_bytes():
    update = shared()
    frame = encode(update, SPEC)
    for kind in (bytearray, memoryview):
        same(decode(kind(frame), LAYOUT, EXPECTED), update)


def test_a_stack_is_measured_as_its_clients_are():
    x = torch.randn(3, 4, LAYOUT.d)
    parts = sparse({"w": x[0], "m": x[1], "v": x[2]}, top_k(x[0], 30))
    update = Update(parts, (1.0, 2.0, 3.0, 4.0))
    specs = [replace(SPEC, client=100 * n) for n in range(4)]
    sizes = [len(encode(one, spec)) for one, spec in zip(update, specs, strict=True)]
    assert encoded_sizes(update, specs) == sizes


@given(
    st.integers(0, 2**64), st.integers(0, 2**64), st.integers(1, 700), st.sampled_from([1.0, 0.5])
)
def test_a_header_is_as_long_as_it_is_counted(round, client, k, weight):
    x = torch.arange(2.0 * LAYOUT.d).view(2, 1, -1)
    parts = (*sparse({"w": x[0], "m": x[1]}, top_k(x[0], k), {"w": Log(4)}), *dense({"v": x[1]}))
    spec = replace(SPEC, round=round, client=client)
    (header,) = headers_of(Update(parts, (weight,)), [spec])
    assert header_size(header) == len(write_header(header))


def test_separate_masks_travel_as_separate_parts():
    x = torch.randn(3, 1, LAYOUT.d)
    parts = [sparse({role: x[i]}, top_k(x[i], 20 + i))[0] for i, role in enumerate("wmv")]
    update = Update(tuple(parts), (2.0,))
    frame = encode(update, SPEC)
    assert len(frame) == encoded_size(update, SPEC)
    same(decode(frame, LAYOUT), update)


def test_double_precision_travels_exactly():
    layout = Layout.of(nn.Linear(5, 4, dtype=torch.float64))
    update = shared(layout=layout, k=7)
    same(decode(encode(update, Spec(layout)), layout), update)


def test_the_header_is_small():
    (header,) = headers_of(shared(), [SPEC])
    assert len(write_header(header)) <= 60


def test_the_state_hash_tells_states_apart():
    state = Moments(torch.ones(3), torch.zeros(3), torch.zeros(3))
    assert state_hash(state) == state_hash(Moments(*(x.clone() for x in state)))
    assert state_hash(state) != state_hash(state._replace(v=torch.tensor([0, 0, 1e-45])))
    assert len(state_hash(state)) == 8


@given(st.integers(0, 2**64 - 1))
def test_numbers_of_any_size_travel(value):
    assert Reader(varint(value)).varint() == value


@pytest.mark.parametrize("raw", [b"\x80\x00", b"\xff" * 11, b"\x80", b""])
def test_a_number_in_another_form_is_refused(raw):
    with pytest.raises(FrameError):
        Reader(raw).varint()


# Hostile frames. Each has a checksum that fits, so that only the check itself can refuse it.


def sealed(body):
    return body + checksum(body)


def forged(update=None, payload=None, **lies):
    """A frame whose header lies, with a checksum that fits."""
    update = update or shared()
    honest = encode(update, SPEC)
    header, at = read_header(honest)
    if "part" in lies:
        lies["parts"] = (replace(header.parts[0], **lies.pop("part")), *header.parts[1:])
    body = write_header(replace(header, **lies))
    return sealed(body + (honest[at:-8] if payload is None else payload))


def payload_of(update):
    frame = encode(update, SPEC)
    header, at = read_header(frame)
    index = header.parts[0].index_bytes
    return frame[at : at + index], frame[at + index : -8]


def refused(frame, reason, limits=EXPECTED, layout=LAYOUT):
    with pytest.raises(FrameError, match=reason):
        decode(frame, layout, limits)


def test_the_honest_frame_is_accepted():
    same(decode(forged(), LAYOUT, replace(EXPECTED, shape=shape_of(shared()))), shared())


def test_a_frame_of_another_round_is_refused():
    refused(forged(round=6), "wrong round")


def test_a_frame_of_another_base_is_refused():
    refused(forged(base=b"other---"), "wrong base")


def test_a_frame_of_another_run_is_refused():
    refused(forged(run=b"other---"), "wrong run")


def test_a_frame_of_another_client_is_refused():
    refused(forged(client=4), "wrong client")


def test_a_frame_of_another_algorithm_is_refused():
    refused(forged(algorithm="fedadam"), "wrong algorithm")


def test_a_frame_for_another_model_is_refused():
    refused(forged(d=LAYOUT.d + 1), "wrong d")


def test_too_many_coordinates_are_refused():
    refused(encode(shared(k=51), SPEC), "wrong shape", replace(EXPECTED, shape=shape_of(shared())))


def test_too_few_coordinates_are_refused():
    refused(encode(shared(k=49), SPEC), "wrong shape", replace(EXPECTED, shape=shape_of(shared())))


def test_other_coders_than_agreed_are_refused():
    other = shared(coders={"w": Linear(4)})
    refused(encode(other, SPEC), "wrong shape", replace(EXPECTED, shape=shape_of(shared())))


def test_two_to_the_63_elements_are_refused_at_once():
    refused(forged(d=2**63), "wrong d")
    refused(forged(part={"k": 2**63}), "more coordinates")
    refused(forged(part={"index_bytes": 2**63}), "longer or shorter")


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf, -1.0, 0.0, 65.0])
def test_a_weight_that_is_inflated_or_no_number_is_refused(weight):
    refused(forged(weight=weight), "weight", replace(EXPECTED, max_weight=64.0))


@pytest.mark.parametrize("indices", [[5, 5, 9], [9, 5, 20], [0, 1, LAYOUT.d]])
def test_packed_indices_that_repeat_disorder_or_leave_the_model_are_refused(indices):
    bits = (LAYOUT.d - 1).bit_length()
    flat = "".join(format(i, f"0{bits}b")[::-1] for i in indices)
    packed = np.packbits([int(b) for b in flat], bitorder="little").tobytes()
    _, values = payload_of(shared(k=3))
    part = {"index": CODERS[1], "index_bytes": len(packed)}
    refused(forged(shared(k=3), packed + values, part=part), "packed")


def test_a_bitmap_with_another_count_or_a_bit_too_far_is_refused():
    _, values = payload_of(shared(k=3))
    size = -(-LAYOUT.d // 8)
    part = {"index": CODERS[0], "index_bytes": size}
    four = (0b1111).to_bytes(size, "little")
    refused(forged(shared(k=3), four + values, part=part), "bitmap: not k")
    far = (0b11 | 1 << (8 * size - 1)).to_bytes(size, "little")
    refused(forged(shared(k=3), far + values, part=part), "bitmap: padding")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e7])
@pytest.mark.parametrize("place", [0, 50, 100])
def test_values_that_are_no_numbers_or_huge_are_refused(value, place):
    index, values = payload_of(shared())
    limit = 1e13 if place == 100 and value == 1e7 else value  # V is bounded by the square
    hostile = values[: 4 * place] + struct.pack("<f", limit) + values[4 * place + 4 :]
    refused(forged(payload=index + hostile), "value")


@pytest.mark.parametrize("coder", [Linear(4), Log(4), Sign()])
@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0, 1e7])
def test_scales_that_are_no_numbers_or_huge_are_refused(coder, scale):
    update = shared(coders={"w": coder})
    index, values = payload_of(update)
    refused(forged(update, index + struct.pack("<f", scale) + values[4:]), "scale")


def test_a_role_sent_twice_is_refused():
    part = sparse({"w": torch.randn(1, LAYOUT.d)}, top_k(torch.randn(1, LAYOUT.d), 5))[0]
    refused(encode(Update((part, part), (1.0,)), SPEC), "sent twice")
    refused(encode(Update((part,) * 4, (1.0,)), SPEC), "more parts than roles")


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 30, 50, 100])
def test_a_truncated_frame_is_refused_with_or_without_a_new_checksum(cut):
    frame = encode(shared(), SPEC)
    refused(frame[:cut], "checksum")
    refused(sealed(frame[:cut]), "truncated|not a frame|version|longer or shorter")


def test_bytes_after_the_end_are_refused():
    refused(sealed(encode(shared(), SPEC)[:-8] + b"\0"), "longer or shorter")


def test_unknown_coders_versions_and_roles_are_refused():
    body = encode(shared(), SPEC)[:-8]
    refused(sealed(b"xx" + body[2:]), "not a frame")
    refused(sealed(body[:2] + b"\x09" + body[3:]), "version 9")
    (header,) = headers_of(shared(), [SPEC])
    at = len(write_header(replace(header, parts=())))
    refused(sealed(body[:at] + b"\x18" + body[at + 1 :]), "without roles")
    refused(sealed(body[:at] + b"\x27" + body[at + 1 :]), "unknown index coder")


def test_a_weight_has_one_form():
    (header,) = headers_of(shared(), [SPEC])
    at = len(write_header(replace(header, parts=()))) - 2
    body = encode(shared(), SPEC)[:-8]
    assert body[at] == 64
    for weight in (64.0, 1.0):
        form = b"\0" + struct.pack("<d", weight)
        refused(sealed(body[:at] + form + body[at + 1 :]), "whole weight")
    refused(sealed(body[:at] + varint(2**53) + body[at + 1 :]), "too large")
    refused(sealed(body[:at] + b"\0" + struct.pack("<d", 0.0) + body[at + 1 :]), "weight 0.0")


@given(st.floats(min_value=1e-300, max_value=1e300) | st.integers(1, 2**60).map(float))
def test_any_weight_travels(weight):
    update = shared(weight=weight)
    frame = encode(update, SPEC)
    assert len(frame) == encoded_size(update, SPEC)
    assert decode(frame, LAYOUT, EXPECTED).weights == (weight,)


def test_values_longer_than_packed_are_refused():
    update = shared(coders={"w": Linear(4), "m": Linear(4), "v": Log(4)})
    most = Linear(4).size(50)
    for size in (most + 1, 2**63):
        refused(forged(update, part={"value_bytes": (size, most, most)}), "more bytes")
    refused(forged(update, part={"value_bytes": (most - 1, most, most)}), "longer or shorter")


@pytest.mark.parametrize("clients", [1, 7])
def test_a_stack_of_codes_is_measured_as_its_clients_are(clients):
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


@given(data=st.data())
def test_a_changed_frame_is_never_accepted(data):
    frame = bytearray(encode(shared(), SPEC))
    place = data.draw(st.integers(0, len(frame) - 1))
    frame[place] ^= data.draw(st.integers(1, 255))
    refused(bytes(frame), "checksum")


@given(data=st.data())
def test_changed_bytes_under_a_new_checksum_give_an_update_or_a_reason(data):
    body = bytearray(encode(shared(coders={"v": Log(4), "m": Linear(2)}), SPEC)[:-8])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        update = decode(sealed(bytes(body)), LAYOUT, EXPECTED)
    except FrameError:
        return
    for part in update.parts:
        assert part.indices is None or bool((part.indices.diff() > 0).all())
        for coded in part.values.values():
            assert bool(torch.isfinite(coded.restore()).all())


def test_nothing_large_is_allocated_on_a_frames_word(monkeypatch):
    """Opening a frame that claims much fails before any coder is asked to do anything."""
    for coder in CODERS:
        monkeypatch.setattr(type(coder), "decode", lambda *_: pytest.fail("asked to decode"))
    for lie in ({"part": {"k": 2**40}}, {"d": 2**40}, {"part": {"index_bytes": 2**40}}):
        with pytest.raises(FrameError):
            open_frame(forged(**lie), LAYOUT, EXPECTED)


def test_a_value_that_the_models_precision_cannot_hold_is_refused():
    layout = Layout.of(nn.Linear(4, 4, dtype=torch.float16))
    values = torch.full((1, layout.d), 1e5)
    frame = encode(Update(dense({"w": values}, Float("float32")), (1.0,)), Spec(layout))
    refused(frame, "above", Limits(max_abs=math.inf), layout)


def test_a_very_large_limit_is_no_error():
    frame = encode(Update(dense({"v": torch.ones(1, LAYOUT.d)}), (1.0,)), SPEC)
    assert decode(frame, LAYOUT, Limits(max_abs=1e200)).weights == (1.0,)


def test_random_rounding_follows_its_generator():
    x = torch.randn(1, LAYOUT.d)
    coder = Linear(2, stochastic=True)

    def draw(seed):
        parts = dense({"w": x}, coder, torch.Generator().manual_seed(seed))
        return parts[0].values["w"].restore()

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


@pytest.mark.parametrize(
    "frame",
    [
        forged(part={"k": 2**40}),
        forged(algorithm="[/red]"),
        sealed(encode(shared(), SPEC)[:-8] + b"\0"),
        sealed(encode(shared(), SPEC)[:-8].replace(b"fedadam-ssm", b"fedadam\x1b[m")),
    ],
    ids=["more than d", "markup", "too long", "escape codes"],
)
def test_inspecting_a_hostile_file_ends_in_one_line(frame, tmp_path, capsys):
    from fedsift.cli.main import main

    file = tmp_path / "frame"
    file.write_bytes(frame)
    code = main(["frame", "inspect", str(file)])
    said = capsys.readouterr()
    assert (code, said.err.count("\n")) in {(0, 0), (2, 1)}
    assert "\x1b[m" not in said.out + said.err

"""Hostile frames with a correct checksum: only the check under test can refuse them."""

import gc
import math
import struct
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from codec.test_frame import EXPECTED, LAYOUT, SPEC, same, shared
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
    shape_of,
    sparse,
)
from fedsift.codec.frame import checksum, frame_headers, parse_expected_frame
from fedsift.codec.header import read_header, varint, write_header
from fedsift.codec.index import INDEX_CODERS
from fedsift.codec.update import ROLES
from fedsift.selection.masks import top_k
from fedsift.vector import Layout


def sealed(body):
    return body + checksum(body)


def forged(update=None, payload=None, **lies):
    """Return a frame with false header fields and a correct checksum."""
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


def test_an_unmodified_frame_is_accepted():
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


def test_unexpected_coders_are_refused():
    other = shared(coders={"w": Linear(4)})
    refused(encode(other, SPEC), "wrong shape", replace(EXPECTED, shape=shape_of(shared())))


def test_sizes_of_two_to_the_63_are_refused():
    refused(forged(d=2**63), "wrong d")
    refused(forged(part={"k": 2**63}), "more coordinates")
    refused(forged(part={"index_bytes": 2**63}), "longer or shorter")


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf, -1.0, 0.0, 65.0])
def test_an_invalid_weight_is_refused(weight):
    refused(forged(weight=weight), "weight", replace(EXPECTED, max_weight=64.0))


@pytest.mark.parametrize("indices", [[5, 5, 9], [9, 5, 20], [0, 1, LAYOUT.d]])
def test_invalid_packed_indices_are_refused(indices):
    bits = (LAYOUT.d - 1).bit_length()
    flat = "".join(format(i, f"0{bits}b")[::-1] for i in indices)
    packed = np.packbits([int(b) for b in flat], bitorder="little").tobytes()
    _, values = payload_of(shared(k=3))
    part = {"index": INDEX_CODERS[1], "index_bytes": len(packed)}
    refused(forged(shared(k=3), packed + values, part=part), "packed")


def test_an_invalid_bitmap_is_refused():
    _, values = payload_of(shared(k=3))
    size = -(-LAYOUT.d // 8)
    part = {"index": INDEX_CODERS[0], "index_bytes": size}
    four = (0b1111).to_bytes(size, "little")
    refused(forged(shared(k=3), four + values, part=part), "bitmap: not k")
    far = (0b11 | 1 << (8 * size - 1)).to_bytes(size, "little")
    refused(forged(shared(k=3), far + values, part=part), "bitmap: padding")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e7])
@pytest.mark.parametrize("place", [0, 50, 100])
def test_nonfinite_or_huge_values_are_refused(value, place):
    index, values = payload_of(shared())
    limit = 1e13 if place == 100 and value == 1e7 else value  # V is bounded by the square
    hostile = values[: 4 * place] + struct.pack("<f", limit) + values[4 * place + 4 :]
    refused(forged(payload=index + hostile), "value")


@pytest.mark.parametrize("coder", [Linear(4), Log(4), Sign()])
@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0, 1e7])
def test_nonfinite_negative_or_huge_scales_are_refused(coder, scale):
    update = shared(coders={"w": coder})
    index, values = payload_of(update)
    refused(forged(update, index + struct.pack("<f", scale) + values[4:]), "scale|value")


def test_a_role_sent_twice_is_refused():
    part = sparse({"w": torch.randn(1, LAYOUT.d)}, top_k(torch.randn(1, LAYOUT.d), 5))[0]
    refused(encode(Update((part, part), (1.0,)), SPEC), "sent twice")
    refused(encode(Update((part,) * (len(ROLES) + 1), (1.0,)), SPEC), "more parts than roles")


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 30, 50, 100])
def test_a_truncated_frame_is_refused_even_with_a_correct_checksum(cut):
    frame = encode(shared(), SPEC)
    refused(frame[:cut], "checksum")
    refused(sealed(frame[:cut]), "truncated|not a frame|version|longer or shorter")


def test_a_refused_frame_leaves_nothing_in_memory():
    """In Python 3.11, f(*(generator)) leaks if the generator raises."""
    cut = sealed(encode(shared(), SPEC)[:42])  # in the sizes of values

    def refuse(times):
        for _ in range(times):
            refused(cut, "truncated")
        gc.collect()
        return sys.getallocatedblocks()

    before = refuse(100)
    assert refuse(500) - before < 100


def test_bytes_after_the_end_are_refused():
    refused(sealed(encode(shared(), SPEC)[:-8] + b"\0"), "longer or shorter")


def test_unknown_coders_versions_and_roles_are_refused():
    body = encode(shared(), SPEC)[:-8]
    refused(sealed(b"xx" + body[2:]), "not a frame")
    refused(sealed(body[:2] + b"\x09" + body[3:]), "version 9")
    (header,) = frame_headers(shared(), [SPEC])
    at = len(write_header(replace(header, parts=())))
    refused(sealed(body[:at] + b"\x18" + body[at + 1 :]), "without roles")
    refused(sealed(body[:at] + b"\x87" + body[at + 1 :]), "dense and on its own")


def test_a_weight_has_a_single_encoding():
    (header,) = frame_headers(shared(), [SPEC])
    at = len(write_header(replace(header, parts=()))) - 2
    body = encode(shared(), SPEC)[:-8]
    assert body[at] == 64
    for weight in (64.0, 1.0):
        form = b"\0" + struct.pack("<d", weight)
        refused(sealed(body[:at] + form + body[at + 1 :]), "whole weight")
    refused(sealed(body[:at] + varint(2**53) + body[at + 1 :]), "too large")
    refused(sealed(body[:at] + b"\0" + struct.pack("<d", 0.0) + body[at + 1 :]), "weight 0.0")


def test_values_longer_than_bit_packed_ones_are_refused():
    update = shared(coders={"w": Linear(4), "m": Linear(4), "v": Log(4)})
    most = Linear(4).size(50)
    for size in (most + 1, 2**63):
        refused(forged(update, part={"value_bytes": (size, most, most)}), "more bytes")
    refused(forged(update, part={"value_bytes": (most - 1, most, most)}), "longer or shorter")


@given(data=st.data())
def test_a_changed_frame_is_never_accepted(data):
    frame = bytearray(encode(shared(), SPEC))
    place = data.draw(st.integers(0, len(frame) - 1))
    frame[place] ^= data.draw(st.integers(1, 255))
    refused(bytes(frame), "checksum")


@given(data=st.data())
def test_changed_bytes_with_a_correct_checksum_give_an_update_or_a_frame_error(data):
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


def test_false_sizes_are_refused_before_any_coder_runs(monkeypatch):
    for coder in INDEX_CODERS:
        monkeypatch.setattr(type(coder), "decode", lambda *_: pytest.fail("a coder was called"))
    for lie in ({"part": {"k": 2**40}}, {"d": 2**40}, {"part": {"index_bytes": 2**40}}):
        with pytest.raises(FrameError):
            parse_expected_frame(forged(**lie), LAYOUT, EXPECTED)


def test_a_value_out_of_range_of_the_models_type_is_refused():
    layout = Layout.of(nn.Linear(4, 4, dtype=torch.float16))
    values = torch.full((1, layout.d), 1e5)
    frame = encode(Update(dense({"w": values}, Float("float32")), (1.0,)), Spec(layout))
    refused(frame, "above", Limits(max_abs=math.inf), layout)


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
def test_inspecting_a_hostile_file_prints_one_line(frame, tmp_path, capsys):
    from fedsift.cli import main

    file = tmp_path / "frame"
    file.write_bytes(frame)
    code = main(["frame", "inspect", str(file)])
    said = capsys.readouterr()
    assert (code, said.err.count("\n")) in {(0, 0), (2, 1)}
    assert "\x1b[m" not in said.out + said.err

"""The committed frames decode to their description, and encode to the same bytes."""

import json

import pytest
import torch

from codec.make_vectors import LAYOUT, VECTORS, cases, describe
from fedsift.codec import Spec, decode, encode
from fedsift.codec.header import read_header
from fedsift.codec.values import VALUE_CODERS

ABOUT = json.loads((VECTORS / "vectors.json").read_text())
FRAMES = {each["file"].removesuffix(".bin"): each for each in ABOUT["frames"]}


def spec_of(frame):
    header, _ = read_header(frame)
    where = (header.algorithm, header.round, header.client, header.run, header.base)
    return Spec(LAYOUT, *where)


@pytest.mark.parametrize("name", FRAMES)
def test_a_committed_frame_decodes_to_its_description(name):
    frame = (VECTORS / f"{name}.bin").read_bytes()
    update = decode(frame, LAYOUT)
    assert json.loads(json.dumps(describe(name, update, frame))) == FRAMES[name]


@pytest.mark.parametrize("name", FRAMES)
def test_a_committed_frame_encodes_to_the_same_bytes(name):
    frame = (VECTORS / f"{name}.bin").read_bytes()
    assert encode(decode(frame, LAYOUT), spec_of(frame)) == frame


@pytest.mark.parametrize("name", FRAMES)
def test_the_encoder_writes_the_committed_frame(name):
    frame = (VECTORS / f"{name}.bin").read_bytes()
    assert encode(cases()[name], spec_of(frame)) == frame


def test_the_vectors_include_every_index_coder():
    used = {part["index_coder"] for each in FRAMES.values() for part in each["parts"]}
    assert used == {None, "bitmap", "packed", "entropy"}


def test_the_vectors_include_packed_and_entropy_coded_values():
    forms = {
        (each["coder"], each["bytes"] == VALUE_CODERS[each["coder"]].size(part["k"]))
        for frame in FRAMES.values()
        for part in frame["parts"]
        for each in part["values"].values()
    }
    assert forms > {("int4", True), ("int4", False), ("log8", True), ("log4", False)}


def test_the_layout_is_the_committed_one():
    assert ABOUT["layer_offsets"] == list(LAYOUT.offsets)
    assert ABOUT["d"] == LAYOUT.d == int(torch.tensor(LAYOUT.sizes).sum())

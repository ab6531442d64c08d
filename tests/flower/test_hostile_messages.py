"""Whatever clients upload, the server reads or refuses it, within bounds on memory and requests."""

import random
import sys
import time
from pathlib import Path

import pytest
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

from fedsift.flower import pull
from fedsift.flower.protocol import MalformedReply

FUZZ = Path(__file__).parents[2] / "fuzz"
sys.path.append(str(FUZZ))
import check_reply  # noqa: E402
from choices import Choices  # noqa: E402


@pytest.mark.parametrize("case", sorted((FUZZ / "replies").iterdir()), ids=lambda case: case.name)
def test_the_corpus_is_read_or_refused(case):
    check_reply.check(case.read_bytes())


def test_some_seconds_of_random_replies_are_read_or_refused():
    draw, until, merged = random.Random(1), time.monotonic() + 3, 0
    for _ in range(200):
        if time.monotonic() < until:
            merged += check_reply.check(draw.randbytes(draw.choice([8, 60, 200])))
    assert merged > 0


def grid_with(count):
    """A grid on which some clients have uploaded honest updates."""
    unchanged_update = b"\0\0\1\0\0"
    grid = check_reply.SuperLink(Choices(count * unchanged_update))
    ids = [grid.push(client % check_reply.CLIENTS) for client in range(count)]
    return grid, ids


def test_a_long_list_of_objects_is_refused_before_it_is_read():
    grid, (id,) = grid_with(1)
    pulling = pull.BoundedPull(grid, 1 << 20)
    extra = [ObjectTree(object_id="f" * 64)] * 10_000
    grid.uploads[id].tree.children.extend(extra)
    with pytest.raises(MalformedReply, match="a list of objects of more than"):
        pulling(id)
    # With a list just short enough to be read, the objects are counted.
    del grid.uploads[id].tree.children[3000:]
    with pytest.raises(MalformedReply, match="more than 48 objects"):
        pulling(id)


def test_replies_that_never_arrive_completely_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(pull, "MAX_INCOMPLETE_BYTES", 20_000)
    grid, ids = grid_with(30)
    pulling = pull.BoundedPull(grid, 1 << 20)
    for upload in grid.uploads.values():  # all but the object that is asked for last
        upload.unavailable = {next(iterate_object_tree(upload.tree)).object_id}
    for _ in range(3):
        assert [pulling(id) for id in ids] == [None] * 30
        assert sum(each.size for each in pulling.downloads.values()) < 30_000
    requests = grid.requests
    assert [pulling(id) for id in ids] == [None] * 30
    assert grid.requests - requests == 30  # only what is missing is asked for again
    for upload in grid.uploads.values():
        upload.unavailable.clear()
    assert all(pulling(id).has_content() for id in ids)
    assert not pulling.downloads

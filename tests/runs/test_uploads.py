"""What a run records of its uploads: the metrics' bytes, and masks as a plain count has them."""

import shutil
from dataclasses import replace
from itertools import permutations

import pytest
import torch
from torch import nn

from fedsift.algorithms import METHODS
from fedsift.codec.frame import Spec, encode
from fedsift.codec.header import varint
from fedsift.codec.inspect import bytes_by_part, summarize_frame
from fedsift.codec.update import Update, dense, sparse
from fedsift.codec.values import Linear, Log
from fedsift.engine import Stacked
from fedsift.runs import RunConfig, RunFolder, federation_of, restore_run, train_rounds
from fedsift.runs.uploads import MOST_CLIENTS, Uploads, magnitudes_of
from fedsift.simulation import run_rounds
from fedsift.task.labels import labels_of
from fedsift.vector import Layout

LAYOUT = Layout.of(nn.Linear(99, 1))
D = LAYOUT.d


def masks(clients, k, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [set(torch.randperm(D, generator=draw)[:k].tolist()) for _ in range(clients)]


def update_of(chosen):
    mask = torch.zeros(1, D, dtype=torch.bool)
    mask[0, list(chosen)] = True
    x = torch.linspace(1, 2, D)[None]
    return Update(sparse({"w": x, "m": x, "v": x}, mask), (1.0,))


def summed_up(updates, round=1):
    uploads = Uploads(D)
    for client, update in enumerate(updates):
        spec = Spec(LAYOUT, "any", round, client)
        uploads.add([spec], update, [len(encode(update, spec))])
    return uploads.finish_round(round)


def test_overlap_and_union_are_those_of_the_masks_as_sets():
    chosen = masks(clients=7, k=20)
    (mask,) = summed_up([update_of(c) for c in chosen])["masks"].values()
    overlaps = [len(a & b) / 20 for a, b in permutations(chosen, 2)]
    assert mask["kept"] == 20
    assert mask["overlap"] == pytest.approx(sum(overlaps) / len(overlaps), rel=1e-12)
    assert mask["union"] == len(set.union(*chosen)) / D


def test_every_pair_of_the_first_clients_is_compared():
    chosen = masks(clients=MOST_CLIENTS + 3, k=9)
    line = summed_up([update_of(c) for c in chosen], round=50)
    first = chosen[:MOST_CLIENTS]
    assert line["clients"] == list(range(MOST_CLIENTS))
    assert line["shared"] == {"wmv": [[len(a & b) for b in first] for a in first]}


def test_masks_of_different_sizes_are_counted_too():
    line = summed_up([update_of({1, 2, 3, 4}), update_of({3, 4})])
    assert line["masks"]["wmv"] == {"kept": 3.0, "overlap": 2 / 3, "union": 4 / D}


def test_a_single_client_has_no_overlap():
    assert summed_up([update_of({1, 2})])["masks"]["wmv"]["overlap"] is None


def test_a_stack_of_clients_is_recorded_as_one_after_another():
    chosen = masks(clients=5, k=12)
    each = [update_of(c) for c in chosen]
    stack = torch.zeros(5, D, dtype=torch.bool)
    for row, c in zip(stack, chosen, strict=True):
        row[list(c)] = True
    x = torch.linspace(1, 2, D).expand(5, D)
    update = Update(sparse({"w": x, "m": x, "v": x}, stack), (1.0,) * 5)
    specs = [Spec(LAYOUT, "any", 1, client) for client in range(5)]
    uploads = Uploads(D)
    uploads.add(specs, update, [len(encode(u, s)) for u, s in zip(each, specs, strict=True)])
    assert uploads.finish_round(1) == summed_up(each)


def test_a_round_without_uploads_is_recorded_and_the_next_round_starts_at_zero():
    uploads = Uploads(D)
    spec, update = Spec(LAYOUT, "any", 3), update_of({5})
    uploads.add([spec], update, [len(encode(update, spec))])
    uploads.finish_round(3)
    assert uploads.finish_round(4) == {"round": 4, "uploads": 0, "bytes": {}, "masks": {}}


def test_magnitudes_are_counted_by_decade_and_zeros_separately():
    x = torch.tensor([0.0, 0.15, -0.15, 1.5e-7, 1e-30])
    update = Update(dense({"w": torch.cat([x, torch.full((D - 5,), 15.0)])[None]}), (1.0,))
    found = summed_up([update])["magnitudes"]["w"]
    assert found["outside"] == 2
    by_bin = {round(found["from"] + n * found["step"], 6): c for n, c in enumerate(found["counts"])}
    assert {edge: c for edge, c in by_bin.items() if c} == {-6.9: 1, -0.9: 2, 1.1: D - 5}


def test_a_large_update_is_sampled_evenly():
    x = torch.cat([torch.full((1 << 17,), 1.5), torch.full((1 << 17,), 15.0)])
    low, high = (count for count in magnitudes_of(x).tolist() if count)
    assert low == high
    assert low + high <= 1 << 16


@pytest.mark.parametrize("roles", [("w",), ("w", "m", "v")])
@pytest.mark.parametrize("k", [1, 30])
def test_bytes_by_part_are_those_in_the_frame(roles, k):
    mask = torch.zeros(1, D, dtype=torch.bool)
    mask[0, :: D // k][:k] = True
    x = torch.ones(1, D)
    update = Update(sparse(dict.fromkeys(roles, x), mask), (1.0,))
    frame = encode(update, Spec(LAYOUT, "any", 200, 3))
    found = bytes_by_part(update, [Spec(LAYOUT, "any", 200, 3)], [len(frame)])
    (part,) = summarize_frame(frame).header.parts
    assert sum(found.values()) == len(frame)
    assert tuple(found[role] for role in roles) == part.value_bytes
    has_length = part.index is not None and part.index.name == "entropy"
    assert found["mask"] - part.index_bytes == has_length  # the field that says how long it is


def test_values_of_variable_length_are_counted_separately_from_the_mask():
    x = torch.arange(3 * D).view(3, D) % torch.tensor([[2], [7], [D]]) + 1.0
    coders = {"w": Linear(4), "v": Log(4)}
    update = Update(sparse({"w": x, "v": x.square()}, x > 0, coders, k=D), (1.0, 2.0, 0.5))
    specs = [Spec(LAYOUT, "any", 200, client) for client in range(3)]
    frames = [encode(one, spec) for one, spec in zip(update, specs, strict=True)]
    found = bytes_by_part(update, specs, [len(frame) for frame in frames])
    parts = [summarize_frame(frame).header.parts[0] for frame in frames]
    for place, role in enumerate(("w", "v")):
        sizes = [part.value_bytes[place] for part in parts]
        assert found[role] == sum(size + len(varint(size)) for size in sizes)
    assert sum(found.values()) == sum(map(len, frames))


@pytest.mark.parametrize("name", METHODS)
def test_the_bytes_of_every_method_add_up_to_what_the_metrics_say(name, tmp_path):
    config = RunConfig.from_values({"algorithm": name, "clients": 4, "rounds": 2})
    folder, federation = RunFolder.create(tmp_path / "run", config), federation_of(config)
    history = list(train_rounds(folder, federation, restore_run(folder, federation), config.rounds))
    lines = folder.uploads()
    sent = sum(sum(line["bytes"].values()) for line in lines)
    assert sent / config.clients == history[-1]["uplink_bytes"]
    is_sparse = "density" in federation.algorithm.settings or name == "fedadamw"  # its blocks of V
    assert all(bool(line["masks"]) == is_sparse == ("mask" in line["bytes"]) for line in lines)
    has_vectors = name not in ("decomfl", "e3sfc")  # only scalars or a sample travel
    assert all(bool(line["magnitudes"]) == has_vectors for line in lines)


def test_the_stacked_engine_records_what_the_reference_does():
    config = RunConfig.from_values({"clients": 4, "rounds": 2, "local_steps": 2})
    federation = federation_of(config)
    lines = []
    for engine in (federation.engine, Stacked(federation.task, federation.algorithm)):
        uploads = Uploads(federation.task.layout.d)
        watched = replace(federation, engine=engine, on_upload=uploads.add)
        next(run_rounds(watched, watched.initial_snapshot(), 1))
        lines.append(uploads.finish_round(1))
    ours, theirs = lines
    assert ours["uploads"] == theirs["uploads"] == 4
    assert theirs["masks"]["wmv"]["overlap"] == pytest.approx(ours["masks"]["wmv"]["overlap"], 0.02)
    assert theirs["bytes"]["w"] == ours["bytes"]["w"]


def test_recording_uploads_does_not_change_the_training():
    config = RunConfig.from_values({"clients": 4, "local_steps": 2})
    federation = federation_of(config)
    watched = replace(federation, on_upload=Uploads(federation.task.layout.d).add)
    ours, theirs = (f.run_round(f.initial_snapshot())[0].state for f in (federation, watched))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_the_clients_labels_are_counted(tmp_path):
    config = RunConfig.from_values({"clients": 5, "partition": "dirichlet"})
    federation = federation_of(config)
    counts = labels_of(federation.task.clients)
    for (_, y), row in zip(federation.task.clients, counts, strict=True):
        assert row == [int((y == label).sum()) for label in range(10)]


@pytest.mark.parametrize("y", [torch.randn(3, 1), torch.tensor([0, -1]), torch.tensor([10**6])])
def test_targets_that_are_not_classes_are_not_counted(y):
    assert labels_of([(torch.randn(len(y), 2), y)]) is None


def test_a_run_without_recorded_uploads_can_be_resumed(tmp_path):
    config = RunConfig.from_values({"clients": 3, "rounds": 2, "local_steps": 1})
    folder, federation = RunFolder.create(tmp_path / "run", config), federation_of(config)
    next(train_rounds(folder, federation, restore_run(folder, federation), 2))
    list(train_rounds(folder, federation, restore_run(folder, federation), 1))
    folder.uploads_file.unlink()
    folder.clients_file.unlink()
    list(train_rounds(folder, federation, restore_run(folder, federation), 2))
    assert [line["round"] for line in folder.uploads()] == [2]


def test_an_incomplete_line_is_dropped_with_all_later_lines(tmp_path):
    config = RunConfig.from_values({"clients": 3, "rounds": 2, "local_steps": 1})
    folder, federation = RunFolder.create(tmp_path / "run", config), federation_of(config)
    list(train_rounds(folder, federation, restore_run(folder, federation), 2))
    whole = shutil.copy(folder.uploads_file, tmp_path / "whole")
    with folder.uploads_file.open("a") as file:
        file.write('{"round": 3, "upl')
    restore_run(folder, federation)
    assert folder.uploads_file.read_text() == whole.read_text()

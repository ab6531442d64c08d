"""What clients keep, on the disk: the same bits as in memory, however a run is stopped."""

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedsift.cli import main
from fedsift.federation import memories
from fedsift.federation.memories import InMemory, OnDisk, SlotFile
from fedsift.runs import RunConfig, RunFolder, federation_of, restore_run, train_rounds
from fedsift.runs.checkpoint import load_checkpoint
from fedsift.runs.config import KEEP_CHECKPOINTS
from fedsift.runs.run import CheckpointWriter

CONFIG = RunConfig.from_values(
    {"algorithm": "efficient-adam", "clients": 12, "participation": 0.25, "rounds": 8, "seed": 5}
)
CLIENT_BYTES = 3 * 27_430 * 4


@pytest.fixture
def always_on_disk(monkeypatch):
    """Even small memories are stored in a file."""
    monkeypatch.setattr(memories, "MAX_RAM", 0)


@pytest.fixture(scope="module")
def federation():
    return federation_of(CONFIG)


def run(path, federation, rounds):
    """Play up to a round and stop there."""
    config = replace(CONFIG, rounds=8)
    folder = RunFolder.create_or_continue(path, config)
    list(train_rounds(folder, federation, restore_run(folder, federation), rounds))
    return folder


def assert_same(one, other):
    for a, b in zip(one.state, other.state, strict=True):
        assert torch.equal(a, b)
    assert set(one.client_memory) == set(other.client_memory)
    for n in other.client_memory:
        for name, x in other.client_memory[n].items():
            assert torch.equal(one.client_memory[n][name], x)


def test_memories_on_disk_equal_those_in_ram(tmp_path, federation, monkeypatch):
    held = load_checkpoint(run(tmp_path / "held", federation, 8), federation, "cpu").snapshot
    assert isinstance(held.client_memory, InMemory)
    monkeypatch.setattr(memories, "MAX_RAM", 0)
    disk = load_checkpoint(run(tmp_path / "disk", federation, 8), federation, "cpu").snapshot
    assert isinstance(disk.client_memory, OnDisk)
    assert_same(disk, held)


def test_a_stopped_run_continues_with_the_memories(tmp_path, federation, always_on_disk):
    whole = load_checkpoint(run(tmp_path / "whole", federation, 8), federation, "cpu").snapshot
    for last in (2, 5, 8):
        stopped = run(tmp_path / "stopped", federation, last)
    assert_same(load_checkpoint(stopped, federation, "cpu").snapshot, whole)


def test_rounds_after_a_checkpoint_do_not_change_its_memories(
    tmp_path, federation, always_on_disk, monkeypatch
):
    whole = load_checkpoint(run(tmp_path / "whole", federation, 8), federation, "cpu").snapshot
    folder = run(tmp_path / "stopped", federation, 3)
    playing = train_rounds(folder, federation, restore_run(folder, federation), 8)
    monkeypatch.setattr(CheckpointWriter, "write", lambda self: None)  # as if the machine stopped
    list(playing)
    monkeypatch.undo()
    monkeypatch.setattr(memories, "MAX_RAM", 0)
    assert_same(load_checkpoint(run(folder.path, federation, 8), federation, "cpu").snapshot, whole)


def test_memories_on_disk_are_not_in_the_checkpoint_and_take_little_space(
    tmp_path, federation, always_on_disk, monkeypatch
):
    always = property(lambda keeper: 0.0, lambda keeper, due: None)
    monkeypatch.setattr(
        CheckpointWriter, "due", always, raising=False
    )  # or a slow disk would save less often
    folder = run(tmp_path, federation, 8)
    tensors = load_file(folder.checkpoint_file)
    assert not [name for name in tensors if name.startswith("client/")]
    known = len(tensors["client_slots"])
    assert known > 3
    assert (
        folder.memory_file.stat().st_size <= (known + (2 + KEEP_CHECKPOINTS - 1) * 3) * CLIENT_BYTES
    )


@pytest.mark.parametrize("harm", ["altered", "cut off", "gone"])
def test_a_damaged_file_is_refused_in_one_line(harm, tmp_path, federation, always_on_disk, capsys):
    folder = run(tmp_path / "run", federation, 2)
    content = bytearray(folder.memory_file.read_bytes())
    slot = int(load_file(folder.checkpoint_file)["client_slots"][0, 0])
    content[slot * CLIENT_BYTES + 17] ^= 1
    changed = {"altered": content, "cut off": content[:100], "gone": b""}[harm]
    folder.memory_file.write_bytes(bytes(changed))
    assert main(["resume", str(folder.path)]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert "corrupt" in said[0]


def test_a_slot_without_references_is_reused():
    file = SlotFile({"residual": 3}, torch.zeros(3))
    memories = OnDisk(file)
    for value in range(10):
        memory = {"residual": torch.full((1, 3), float(value))}
        memories = memories.replaced({7: memories.keep(memory)})
        assert memories[7]["residual"].tolist() == [[value] * 3]
    assert file.slots == 2


@pytest.mark.filterwarnings("error")  # of what happens when half an object is thrown away, too
def test_a_file_that_cannot_be_opened_raises_one_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        SlotFile({"residual": 3}, torch.zeros(3), tmp_path / "nowhere" / "memory.bin")
    gc.collect()


def test_a_file_without_references_is_closed():
    def is_open(handle):
        return Path(f"/proc/self/fd/{handle}").exists()

    file = SlotFile({"residual": 3}, torch.zeros(3))
    handle = file.handle
    assert is_open(handle)
    del file
    assert not is_open(handle)


def test_simulations_store_large_memories_on_disk(always_on_disk):
    import fedsift

    x, y = torch.randn(40, 3), torch.randint(0, 2, (40,))
    clients = [(x[n::8], y[n::8]) for n in range(8)]
    method = fedsift.algorithms.efficient_adam()
    result = fedsift.simulate(
        torch.nn.Linear(3, 2), clients, algorithm=method, rounds=4, participation=0.5
    )
    assert isinstance(result.snapshot.client_memory, OnDisk)

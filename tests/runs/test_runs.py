"""The run folder: its files, the detection of damage, and reproducibility from the seed."""

import json
import os
import random
import shutil
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fedsift
from fedsift import data, models
from fedsift.cli import main
from fedsift.errors import ConfigError
from fedsift.federation.round import Federation
from fedsift.report.collect import read_run
from fedsift.runs import RunConfig, RunFolder, disk, federation_of, restore_run, train_rounds
from fedsift.runs.checkpoint import load_checkpoint, save_checkpoint
from fedsift.runs.records import last_round, rewind
from fedsift.vector import Layout

CONFIG = RunConfig.from_values({"algorithm": "efficient-adam", "clients": 4, "rounds": 5})
STOPPED_AFTER = 3


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A run that was interrupted after its third round."""
    run = RunFolder.create(tmp_path_factory.mktemp("runs") / "stopped", CONFIG)
    federation = federation_of(CONFIG)
    records = train_rounds(run, federation, restore_run(run, federation), CONFIG.rounds)
    for _ in range(STOPPED_AFTER):
        next(records)
    with pytest.raises(KeyboardInterrupt):
        records.throw(KeyboardInterrupt)
    return run


@pytest.fixture
def stopped(original, tmp_path):
    """A copy of it, to break at will."""
    return RunFolder.open(shutil.copytree(original.path, tmp_path / "stopped"))


@pytest.fixture(scope="module")
def federation():
    return federation_of(CONFIG)


def files_under(path):
    return {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file()}


# A folder that something happened to.


def test_an_intact_checkpoint_restores_everything_that_a_round_changes(original, federation):
    snapshot = load_checkpoint(original, federation, "cpu").snapshot
    assert snapshot.round == STOPPED_AFTER
    assert set(snapshot.server_memory) == {"residual"}
    assert set(snapshot.client_memory) == {0, 1, 2, 3}
    assert set(snapshot.client_memory[0]) == {"m", "v", "residual"}
    assert snapshot.traffic.uplink_bits_paper == original.history()[-1]["uplink_bits_paper"]


def change_bytes(change):
    def apply(run):
        whole = run.checkpoint_file.read_bytes()
        changed = change(whole)
        assert changed != whole
        run.checkpoint_file.write_bytes(changed)

    return apply


def flip(position):
    def change(whole):
        changed = bytearray(whole)
        changed[position] ^= 1
        return bytes(changed)

    return change_bytes(change)


def rewrite_checkpoint(run, **metadata):
    tensors = load_file(run.checkpoint_file)
    save_file(tensors, run.checkpoint_file, metadata or None)


def give_another_layout(run):
    mine = federation_of(CONFIG)
    other = replace(mine, task=replace(mine.task, layout=Layout.of(nn.Linear(2, 3))))
    save_checkpoint(run, load_checkpoint(run, mine, "cpu"), other, CONFIG)


def change_lines(change):
    def apply(run):
        lines = run.metrics_file.read_text().splitlines(keepends=True)
        run.metrics_file.write_text("".join(change(lines)))

    return apply


def change_algorithm(run):
    text = RunConfig.from_values({"algorithm": "fedadam", "clients": 4, "rounds": 5}).toml()
    run.config_file.write_text(text)


BROKEN = {
    "half of it": (change_bytes(lambda x: x[: len(x) // 2]), "corrupt"),
    "all but its last byte": (change_bytes(lambda x: x[:-1]), "corrupt"),
    "nothing": (change_bytes(lambda x: b""), "corrupt"),
    "something else": (change_bytes(lambda x: b"<html>not found</html>" * 9), "corrupt"),
    "a bit flipped in the last tensor": (flip(-1), "corrupt"),
    "a bit flipped in the middle": (flip(100_000), "corrupt"),
    "another round": (
        change_bytes(lambda x: x.replace(rb"\"round\": 3", rb"\"round\": 2")),
        "corrupt",
    ),
    "tensors of another program": (rewrite_checkpoint, "corrupt"),
    "metadata of another program": (lambda run: rewrite_checkpoint(run, fedsift="{}"), "corrupt"),
    "metadata that is a list": (lambda run: rewrite_checkpoint(run, fedsift="[1]"), "corrupt"),
    "another model's tensors": (give_another_layout, "another model"),
    "another algorithm's tensors": (change_algorithm, "was changed"),
}


def refused(run, capsys, *phrases):
    before = files_under(run.path)
    code = main(["resume", str(run.path)])
    said = capsys.readouterr()
    assert code == 2
    assert said.out == ""
    assert said.err.count("\n") == 1, said.err
    assert all(phrase in said.err for phrase in phrases), said.err
    assert files_under(run.path) == before


@pytest.mark.parametrize(("breaks", "phrase"), BROKEN.values(), ids=BROKEN)
def test_a_broken_checkpoint_is_refused_and_left_unchanged(breaks, phrase, stopped, capsys):
    breaks(stopped)
    refused(stopped, capsys, str(stopped.checkpoint_file), phrase)


def test_a_changed_digit_is_detected_even_if_no_number_changes(stopped, federation):
    """0.1 and 0.10000000000000001 are equal numbers, but the digest covers the text."""
    whole = stopped.checkpoint_file.read_bytes()
    start = whole.index(b'\\"seconds\\": ') + len(b'\\"seconds\\": ')
    number = whole[start : whole.index(b",", start)]
    longer = number + b"0"
    size = int.from_bytes(whole[:8], "little") + 1
    changed = size.to_bytes(8, "little") + whole[8:].replace(number, longer, 1)
    stopped.checkpoint_file.write_bytes(changed)
    assert float(number) == float(longer)
    with pytest.raises(ConfigError, match="its digest does not match"):
        load_checkpoint(stopped, federation, "cpu")


@pytest.mark.parametrize("part", ["header", "tensors"])
def test_every_flipped_bit_is_detected(part, stopped, federation):
    whole = stopped.checkpoint_file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    draw, missed = random.Random(0), []
    for _ in range(150 if part == "header" else 25):
        position = (
            draw.randrange(header) if part == "header" else draw.randrange(header, len(whole))
        )
        changed = bytearray(whole)
        changed[position] ^= 1 << draw.randrange(8)
        stopped.checkpoint_file.write_bytes(changed)
        try:
            load_checkpoint(stopped, federation, "cpu")
        except ConfigError:
            continue
        except Exception as problem:
            missed.append((position, repr(problem)))
        else:
            missed.append((position, "not noticed"))
    assert missed == []


DAMAGED_METRICS = {
    "the last round is missing": (change_lines(lambda lines: lines[:-1]), "does not match"),
    "the first round is missing": (change_lines(lambda lines: lines[1:]), "does not match"),
    "every round is missing": (change_lines(lambda lines: []), "does not match"),
    "a round twice": (change_lines(lambda x: [x[0], *x[:2]]), "line 2 is of round 0, not 1"),
    "no JSON": (change_lines(lambda lines: [lines[0], "?\n", lines[2]]), "(line 2)"),
    "no object": (change_lines(lambda lines: [lines[0], "2\n", lines[2]]), "(line 2)"),
    "no number": (change_lines(lambda lines: [lines[0], "{}\n", lines[2]]), "(line 2)"),
    "no text": (lambda run: run.metrics_file.write_bytes(b"\xff\n"), "(line 1)"),
    "no file": (lambda run: run.metrics_file.unlink(), "has 0 of the 3 rounds"),
}


@pytest.mark.parametrize(("breaks", "phrase"), DAMAGED_METRICS.values(), ids=DAMAGED_METRICS)
def test_damaged_metrics_are_refused_and_left_unchanged(breaks, phrase, stopped, capsys):
    breaks(stopped)
    refused(stopped, capsys, str(stopped.metrics_file), phrase)


@pytest.mark.parametrize("name", ["metrics.jsonl", "uploads.jsonl"])
def test_every_damaged_byte_of_the_lines_is_detected(name, stopped):
    """A flipped bit is refused, whether it breaks the JSON or changes a digit."""
    file, draw, missed = stopped.path / name, random.Random(name), []
    whole = file.read_bytes()
    for _ in range(200):
        position = draw.randrange(len(whole))
        changed = bytearray(whole)
        changed[position] ^= 1 << draw.randrange(8)
        file.write_bytes(changed)
        for read in (lambda: rewind(stopped, STOPPED_AFTER), lambda: read_run(stopped.path)):
            try:
                read()
            except ConfigError as problem:
                assert "\n" not in str(problem)
            else:
                missed.append((position, changed[position]))
    assert missed == []


def test_lines_after_the_checkpoint_are_checked_field_by_field(stopped):
    *_, last = stopped.history()
    for field, value in {"accuracy": "0.5", "clients": None, "round": 5}.items():
        line = json.dumps({**last, "round": 4, field: value})
        with stopped.metrics_file.open("a") as file:
            file.write(line + "\n")
        with pytest.raises(ConfigError, match=r"is damaged \(line 5"):
            stopped.history()
        change_lines(lambda lines: lines[:4])(stopped)


def test_a_run_without_a_record_of_its_kernels_or_lines_can_be_resumed(stopped):
    about, tensors = disk.load_tensors(stopped.checkpoint_file, "cpu")
    about.pop("kernels")
    about.pop("lines")
    disk.save_tensors(stopped.checkpoint_file, tensors, about)
    assert main(["resume", str(stopped.path)]) == 0


def test_a_run_is_not_resumed_with_other_kernels(stopped, capsys, monkeypatch):
    about, _ = disk.load_tensors(stopped.checkpoint_file, "cpu")
    other = {"C": None, "PyTorch": object()}[about["kernels"]]
    monkeypatch.setattr("fedsift.runs.checkpoint.native.load", lambda: other)
    refused(stopped, capsys, f"trained with the {about['kernels']} kernels", "--out")


def test_a_broken_config_is_refused(stopped, capsys):
    stopped.config_file.write_text("rounds = ")
    refused(stopped, capsys, str(stopped.config_file))


def test_a_broken_checkpoint_ends_a_comparison_in_the_same_way(stopped, tmp_path, capsys):
    name = stopped.path.rename(tmp_path / "efficient-adam")
    (name / "checkpoint.safetensors").write_bytes(b"broken")
    words = ["--algorithms", "efficient-adam", "--clients", "4", "--rounds", "5", "--target", "0.5"]
    assert main(["compare", *words, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "corrupt" in said


# Writing, so that a crash leaves the old or the new.


def test_a_crash_while_a_checkpoint_is_written_leaves_the_last_one(
    stopped, federation, monkeypatch
):
    def die_half_way(tensors, path, metadata):
        path.write_bytes(b"half a checkpoint")
        raise KeyboardInterrupt

    before = stopped.checkpoint_file.read_bytes()
    later = load_checkpoint(stopped, federation, "cpu")
    monkeypatch.setattr(disk, "save_file", die_half_way)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(stopped, later, federation, CONFIG)
    assert stopped.checkpoint_file.read_bytes() == before
    assert load_checkpoint(stopped, federation, "cpu").snapshot.round == STOPPED_AFTER


def test_a_checkpoint_records_the_settings_that_trained_even_if_the_file_has_changed(stopped):
    federation = federation_of(CONFIG)
    rounds = train_rounds(stopped, federation, restore_run(stopped, federation), CONFIG.rounds)
    next(rounds)
    text = stopped.config_file.read_text()
    stopped.config_file.write_text(text.replace("lr = 0.001", "lr = 0.5"))
    assert stopped.config() != CONFIG
    rounds.close()  # saves
    with pytest.raises(ConfigError, match="was changed after"):
        load_checkpoint(stopped, federation_of(stopped.config()), "cpu")


def test_memories_of_a_run_with_other_settings_are_not_called_corrupt(tmp_path, monkeypatch):
    monkeypatch.setattr("fedsift.federation.memories.MAX_RAM_IF_ALL_TRAIN", 0)
    config = RunConfig.from_values({"algorithm": "sift", "clients": 3, "rounds": 2})
    run, federation = RunFolder.create(tmp_path / "run", config), federation_of(config)
    list(train_rounds(run, federation, restore_run(run, federation), 2))
    assert run.memory_file.exists()
    other = RunConfig.from_values({"algorithm": "efficient-adam", "clients": 3, "rounds": 2})
    run.config_file.write_text(other.toml())
    with pytest.raises(ConfigError, match="was changed after"):
        load_checkpoint(run, federation_of(other), "cpu")


@pytest.mark.parametrize(
    "write",
    [
        lambda path: disk.save_tensors(path, {"x": torch.zeros(3)}, {}),
        lambda path: disk.replace_file(path, b"new"),
    ],
)
def test_a_failed_write_leaves_no_files(write, tmp_path, monkeypatch):
    def fill_up(*args, **kwargs):
        raise OSError("no space left on device")

    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(disk, "flush_to_disk", fill_up)
    with pytest.raises(OSError, match="no space"):
        write(path)
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("file", b"old")]


def test_a_checkpoint_is_on_the_disk_before_it_replaces_the_last_one(
    stopped, federation, monkeypatch
):
    events, fsync, replace = [], os.fsync, os.replace
    later = load_checkpoint(stopped, federation, "cpu")
    monkeypatch.setattr(os, "fsync", lambda *a: (events.append("fsync"), fsync(*a)))
    monkeypatch.setattr(os, "replace", lambda *a: (events.append("replace"), replace(*a)))
    save_checkpoint(stopped, later, federation, CONFIG)
    assert events[:4] == [*["fsync"] * 3, "replace"]  # uploads, metrics, checkpoint, its name


def test_a_checkpoint_written_and_read_again_has_the_same_bits(stopped, federation, tmp_path):
    first = load_checkpoint(stopped, federation, "cpu")
    other = RunFolder.create(tmp_path / "other", CONFIG)
    for name in ("metrics.jsonl", "uploads.jsonl"):
        shutil.copy(stopped.path / name, other.path / name)
    save_checkpoint(other, first, federation, CONFIG)
    assert other.checkpoint_file.read_bytes() == stopped.checkpoint_file.read_bytes()


def test_an_incomplete_last_line_is_not_part_of_the_history(stopped):
    whole = stopped.history()
    with stopped.metrics_file.open("a") as file:
        file.write('{"round": 4, "accu')
    assert stopped.history() == whole
    assert rewind(stopped, STOPPED_AFTER) == whole
    assert stopped.metrics_file.read_text().count("\n") == STOPPED_AFTER + 1


def test_rewinding_drops_the_rounds_after_the_checkpoint(stopped):
    stopped.checkpoint_file.unlink()
    assert [r["round"] for r in rewind(stopped, 2)] == [0, 1, 2]
    assert [r["round"] for r in stopped.history()] == [0, 1, 2]


def test_a_config_written_and_read_again_is_the_same_run(tmp_path):
    config = RunConfig.from_values({"density": 0.2, "lr": 1e-4, "partition": "dirichlet"})
    (tmp_path / "a.toml").write_text(config.toml())
    assert RunConfig.read(tmp_path / "a.toml").flat() == config.flat()


# TensorBoard.


def events_of(path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path / "tensorboard"))
    events.Reload()
    return {name: events.Scalars(name) for name in events.Tags()["scalars"]}


def test_tensorboard_has_each_round_once_even_after_a_resume(
    tmp_path, monkeypatch
):
    play = Federation.run_round

    def interrupted(self, snapshot):
        if snapshot.round == 2:
            raise KeyboardInterrupt
        return play(self, snapshot)

    out = tmp_path / "out"
    words = ["--clients", "3", "--rounds", "4", "--local-steps", "1", "--out", str(out)]
    with monkeypatch.context() as patched:
        patched.setattr(Federation, "run_round", interrupted)
        assert main(["run", "--tensorboard", *words]) == 130
    assert main(["resume", str(out)]) == 0
    events, history = events_of(out), RunFolder.open(out).history()
    for name in ("accuracy", "loss", "uplink_bits_paper", "uplink_bytes", "seconds"):
        assert [e.step for e in events[name]] == [0, 1, 2, 3, 4]
        assert [e.value for e in events[name]] == pytest.approx([r[name] for r in history])


def test_without_the_option_there_are_no_tensorboard_events(original):
    assert not (original.path / "tensorboard").exists()


# The same seed gives the same result, whatever ran before.


def small_task():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(60, 5, generator=draw)
    y = (x[:, 0] > 0).long()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))
    return model, [(x[i : i + 10], y[i : i + 10]) for i in range(0, 60, 10)]


def simulate(seed=0):
    model, clients = small_task()
    algorithm = fedsift.algorithms.fedadam_ssm(density=0.3, local_steps=3)
    return fedsift.simulate(
        model, clients, test=clients[0], algorithm=algorithm, rounds=4, batch_size=4,
        participation=0.5, dropout=0.3, seed=seed,
    )  # fmt: skip


def outcome(result):
    history = [{k: v for k, v in r.items() if k != "seconds"} for r in result.history]
    return json.dumps(history), *(x.numpy().tobytes() for x in result.state)


def test_the_same_seed_gives_the_same_result_regardless_of_earlier_draws_and_runs():
    first = outcome(simulate())
    torch.randn(3)
    np.random.random(3)  # noqa: NPY002
    random.random()
    simulate(seed=1)
    assert outcome(simulate()) == first


def test_another_seed_gives_another_result():
    assert outcome(simulate(seed=1)) != outcome(simulate(seed=0))


def test_a_simulation_leaves_the_global_random_states_untouched():
    before = torch.get_rng_state(), np.random.get_state()[1], random.getstate()  # noqa: NPY002
    simulate()
    federation_of(CONFIG)
    after = torch.get_rng_state(), np.random.get_state()[1], random.getstate()  # noqa: NPY002
    assert torch.equal(after[0], before[0])
    assert np.array_equal(after[1], before[1])
    assert after[2] == before[2]


def test_a_simulation_does_not_change_the_model_it_is_given():
    model, clients = small_task()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    result = fedsift.simulate(model, clients, rounds=2)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    result.load_into(model)
    assert not torch.equal(model[0].weight, before["0.weight"])


@pytest.mark.parametrize("algorithm", ["fedadam-ssm", "sift"])
def test_the_saved_model_has_the_final_accuracy(algorithm, tmp_path):
    words = ["--clients", "4", "--rounds", "3", "--algorithm", algorithm, "--local-steps", "5"]
    assert main(["run", *words, "--out", str(tmp_path / "run")]) == 0
    model = models.build("small-cnn", data.shape_of("digits"), seed=7)
    model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    x, y = data.load("digits").test
    right = float((model(x).argmax(1) == y).float().mean())
    assert right == pytest.approx(RunFolder.open(tmp_path / "run").history()[-1]["accuracy"])
    w = load_file(tmp_path / "run" / "checkpoint.safetensors")["w"]
    assert torch.equal(w, Layout.of(model).read(model)) == (algorithm == "fedadam-ssm")


class Odd(nn.Module):
    """With a frozen layer, a scalar, a buffer, and two names for one weight."""

    def __init__(self):
        super().__init__()
        self.a, self.frozen = nn.Linear(64, 64), nn.Linear(64, 64).requires_grad_(False)
        self.b = nn.Linear(64, 64)
        self.b.weight = self.a.weight
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("mean", torch.ones(64))

    def forward(self, x):
        return self.scale * self.b(self.frozen(self.a(x.flatten(1)).relu()).relu() - self.mean)


def odd():
    return Odd()


def test_the_saved_model_is_complete_for_every_kind_of_model(tmp_path):
    words = ["--model", f"{__name__}:odd", "--clients", "3", "--rounds", "2", "--local-steps", "3"]
    assert main(["run", *words, "--out", str(tmp_path / "run")]) == 0
    model = odd()
    model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    x, y = data.load("digits").test
    right = float((model(x).argmax(1) == y).float().mean())
    assert right == pytest.approx(RunFolder.open(tmp_path / "run").history()[-1]["accuracy"])


def test_an_existing_model_is_not_replaced(tmp_path, capsys):
    mine = tmp_path / "model.safetensors"
    mine.write_bytes(b"mine")
    assert main(["run", "--rounds", "1", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "model.safetensors already exists" in said
    assert said.count("\n") == 1
    assert mine.read_bytes() == b"mine"


def test_a_run_of_an_older_version_is_reported_as_such(tmp_path):
    config = RunConfig.from_values({"algorithm": "sift", "clients": 2, "rounds": 1})
    run, federation = RunFolder.create(tmp_path / "run", config), federation_of(config)
    list(train_rounds(run, federation, restore_run(run, federation), 1))
    lines = run.config_file.read_text().splitlines(keepends=True)
    run.config_file.write_text("".join(line for line in lines if not line.startswith("average")))
    with pytest.raises(ConfigError, match="an older version of fedsift and lacks the setting `average`"):
        load_checkpoint(run, federation, "cpu")


def test_a_continued_run_has_no_model_of_fewer_rounds(tmp_path):
    config = replace(CONFIG, rounds=1)
    folder, federation = RunFolder.create(tmp_path / "run", config), federation_of(config)
    list(train_rounds(folder, federation, restore_run(folder, federation), 1))
    assert folder.model_file.exists()
    rounds = train_rounds(folder, federation, restore_run(folder, federation), 3)
    next(rounds)
    assert not folder.model_file.exists()
    list(rounds)
    assert folder.model_file.exists()


def test_a_run_does_not_depend_on_earlier_runs_in_the_process(tmp_path):
    def run(name, *words):
        words = ["--clients", "4", "--rounds", "2", "--out", str(tmp_path / name), *words]
        assert main(["run", *words]) == 0
        return load_file(tmp_path / name / "checkpoint.safetensors")

    first = run("first", "--local-steps", "2", "--partition", "dirichlet")
    torch.randn(5)
    run("between", "--algorithm", "onebit-adam", "--seed", "9")
    again = run("again", "--local-steps", "2", "--partition", "dirichlet")
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)


# Findings of a review.


def test_two_processes_cannot_use_the_same_run(stopped, capsys):
    with stopped.locked():
        code = main(["resume", str(stopped.path)])
    assert code == 2
    assert "another process is using" in capsys.readouterr().err
    assert main(["resume", str(stopped.path)]) == 0


def test_two_processes_cannot_use_the_same_run_even_if_its_config_is_replaced(stopped, capsys):
    with stopped.locked():
        text = stopped.config_file.read_bytes()
        disk.replace_file(stopped.config_file, text.replace(b"rounds = 5", b"rounds = 7"))
        assert main(["resume", str(stopped.path)]) == 2
    assert "another process is using" in capsys.readouterr().err


def test_a_run_is_not_created_where_another_process_is_creating_one(tmp_path):
    folder = RunFolder(tmp_path)
    with folder.locked(), pytest.raises(ConfigError, match="another process is using"):
        RunFolder.create(tmp_path, CONFIG)
    assert not folder.config_file.exists()


def test_the_lock_of_a_killed_process_does_not_live_on_in_its_workers(tmp_path):
    folder, (read, write) = RunFolder(tmp_path), os.pipe()
    owner = os.fork()
    if not owner:
        with folder.locked():
            if not os.fork():
                os.write(write, str(os.getpid()).encode())
            signal.pause()
    worker = int(os.read(read, 20))
    assert folder.is_in_use()
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    try:
        assert not folder.is_in_use()
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_changed_setting_cannot_be_resumed_but_more_rounds_can(stopped, capsys):
    text = stopped.config_file.read_text()
    stopped.config_file.write_text(text.replace("seed = 0", "seed = 1"))
    refused(stopped, capsys, "was changed", "only the numbers of rounds, of workers and of checkpoints")
    stopped.config_file.write_text(text.replace(f"rounds = {CONFIG.rounds}", "rounds = 7"))
    assert main(["resume", str(stopped.path)]) == 0
    assert last_round(stopped.history()) == 7


def test_a_continued_run_has_no_summary_until_it_ends(stopped, federation):
    stopped.write_summary({"final_accuracy": 0.1, "rounds": STOPPED_AFTER})
    records = train_rounds(stopped, federation, restore_run(stopped, federation), CONFIG.rounds)
    assert stopped.summary_file.exists()
    last = next(records)
    records.close()
    assert not stopped.summary_file.exists()
    summary = read_run(stopped.path).summary
    assert (summary["stopped_after"], summary["final_accuracy"]) == (4, last["accuracy"])


def test_a_full_disk_ends_in_one_line(stopped, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedsift.runs.run.append_round", full)
    assert main(["resume", str(stopped.path)]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "No space left" in said
    assert said.endswith(f"; continue with: fedsift resume {stopped.path}")

"""Search settings of sift_common on a validation split of Fashion-MNIST's training data.

    python reproduce/sift/search_common.py --out trials.json --seconds 300 --jobs 10
    python reproduce/sift/search_common.py --check

A tenth of the training images is held out from all clients and takes the place of the test set,
which is not read. The seeds differ from those of the reported runs. Trials run side by side:
FedAdam-SSM and sift for comparison, settings that are worth a look, then settings drawn at random,
then changes of the best so far, and at last the best for longer and with other seeds.

``secure`` are the bytes per client up to each round with ``--secure``. They are counted by the
functions that a secure run uses: frames without the masked values, the packed size of these, and
the protocol's messages of a real exchange of 20 clients. ``--check`` compares the count with a
secure run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from multiprocessing.queues import Queue
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from common_variants import sift_common_variant

from fedsift import algorithms, data, models
from fedsift.codec.frame import Spec, encoded_sizes
from fedsift.codec.update import Update
from fedsift.codec.values import Integer
from fedsift.errors import Diverged
from fedsift.privacy.secure.client import SecureClient
from fedsift.privacy.secure.exchange import StageBytes, reply_of, run_exchange
from fedsift.privacy.secure.integers import bits_for, packed_size
from fedsift.privacy.secure.server import Replies, Request, SecureServer
from fedsift.privacy.secure.settings import SecureSettings
from fedsift.runs.run import commit
from fedsift.seeding import stream
from fedsift.selection.masks import num_kept
from fedsift.simulation import Options, initial_snapshot, prepare, run_rounds

CLIENTS = 20
TARGETS = {"iid": 0.804, "noniid": 0.798}
SEEDS = (102, 103)
FINAL_SEEDS = (101, 100)
SHORT, LONG = {"iid": 30, "noniid": 60}, 150
Settings = dict[str, Any]
Row = dict[str, Any]
Frames = dict[int, int]
"""The bytes of all frames without masked values, by round."""

SPACE: dict[str, tuple[Any, ...]] = {
    "density": (0.015, 0.02, 0.02, 0.025, 0.03),
    "shares": (20, 4, 4, 1),
    "named": (1.0, 1.5),
    "ahead": (0.5, 0.5, 0.6, 0.7, 1.0),
    "ahead_off": (0.0, 0.3, 0.4, 0.5, 0.5),
    "decay": (0.9, 0.95, 0.98),
    "largest": (3, 6, 6),
    "level": (2.0, 3.0, 4.0),
    "v_rounds": (5, 8),
    "momentum": (0.5, 0.6, 0.7, 0.7, 0.8),
    "average": (0.05, 0.1),
    "fade": (0.0, 0.0, 100.0),
}
"""The values from which settings are drawn."""
FIXED: Settings = {"bits": 4, "down_bits": 6}
"""What all trials have in common."""
NEAR: Settings = {
    "density": 0.02, "shares": 4, "ahead": 0.5, "ahead_off": 0.5, "momentum": 0.7, "largest": 6,
    "level": 3.0,
}  # fmt: skip
LEADS: tuple[Settings, ...] = (
    NEAR,
    NEAR | {"density": 0.03, "largest": 3},
    NEAR | {"density": 0.03, "largest": 3, "level": 2.0},
    NEAR | {"level": 4.0},
    NEAR | {"shares": 1, "named": 1.5},
    NEAR | {"shares": 20},
    NEAR | {"named": 1.5},
    NEAR | {"momentum": 0.6, "ahead": 0.7, "ahead_off": 0.3},
    NEAR | {"momentum": 0.5, "ahead": 0.7, "ahead_off": 0.3, "decay": 0.9},
    NEAR | {"ahead": 1.0, "ahead_off": 0.0, "named": 1.5, "momentum": 0.5},
    NEAR | {"ahead": 1.0, "ahead_off": 0.3},
    NEAR | {"decay": 0.9},
    NEAR | {"fade": 100.0, "average": 0.1},
    NEAR | {"density": 0.015},
)
"""Settings that are tried first, as changes of the variant's defaults."""


@dataclass(frozen=True)
class Trial:
    """A run: a method with its settings, a split, a seed and a number of rounds."""

    algorithm: str
    settings: tuple[tuple[str, Any], ...]
    setting: str
    seed: int
    rounds: int

    @classmethod
    def of(cls, changes: Settings, setting: str, seed: int, rounds: int = 0) -> Trial:
        """Return a run of the variant."""
        given = tuple(sorted((FIXED | changes).items()))
        return cls("sift-common-variant", given, setting, seed, rounds or SHORT[setting])


def main() -> None:
    """Run trials until the time is over, or check the count of bytes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("trials.json"))
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--jobs", type=int, default=3, help="processes on the GPU, if there is one")
    parser.add_argument("--cpu-jobs", type=int, default=0, help="processes with one core each")
    parser.add_argument("--vgg", action="store_true", help="then train VGG-11 on CIFAR-10, too")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if arguments.check:
        check()
    else:
        search = Search(arguments)
        search.run()
        if arguments.vgg:
            search.run_vgg()


class Search:
    """The rows so far, and the choice of the next trials."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.start = arguments, time.monotonic()
        self.rows: list[Row] = []
        self.draw = random.Random(0)
        self.waiting: list[Trial] = [*leads()]
        self.tried: set[Trial] = set(self.waiting)
        self.is_final = False

    @property
    def share(self) -> float:
        """Return the share of the time that is over."""
        return (time.monotonic() - self.start) / self.arguments.seconds

    def run(self) -> None:
        """Keep all processes busy; write the rows every few seconds."""
        context, written = get_context("spawn"), 0.0
        jobs, devices = self.arguments.jobs + self.arguments.cpu_jobs, context.Queue()
        for number in range(jobs):
            devices.put(("auto", 0) if number < self.arguments.jobs else ("cpu", number))
        pool = ProcessPoolExecutor(jobs, context, initializer=prepare_worker, initargs=(devices,))
        running: dict[Future[Row], Trial] = {}
        deadline = self.start + self.arguments.seconds
        while time.monotonic() < deadline:
            while len(running) < jobs:
                trial = self.next_trial()
                running[pool.submit(train, trial, deadline)] = trial
            done, _ = wait(running, timeout=5, return_when=FIRST_COMPLETED)
            for future in done:
                self.take(running.pop(future), future)
            if len(self.rows) == 3 and all("problem" in row for row in self.rows):
                break
            if time.monotonic() - written > 10:
                self.write()
                written = time.monotonic()
        for future in wait(running, timeout=10).done:
            self.take(running.pop(future), future)
        self.write()
        print(f"{len(self.rows)} runs", [r["problem"] for r in self.rows if "problem" in r][:3])
        for process in pool._processes.values():
            process.kill()

    def run_vgg(self) -> None:
        """Train the defaults and the best settings on VGG-11, one after another."""
        trials = [Trial.of(changes, "vgg", SEEDS[0], 60) for changes in ({}, *self.best(2))]
        for trial in (*trials, Trial("fedadam-ssm", (), "vgg", SEEDS[0], 60)):
            done: Future[Row] = Future()
            try:
                done.set_result(train(trial))
            except Exception as problem:
                done.set_exception(problem)
            self.take(trial, done)
            self.write()

    def take(self, trial: Trial, future: Future[Row]) -> None:
        """Add a finished run; with non-IID data, one that reached the target is repeated."""
        try:
            row = future.result()
        except Exception as problem:
            row = {"problem": f"{type(problem).__name__}: {problem}"}
        row = {
            "algorithm": trial.algorithm, "settings": dict(trial.settings),
            "setting": trial.setting, "seed": trial.seed, "rounds": trial.rounds, **row,
        }  # fmt: skip
        self.rows.append(row)
        is_first = (trial.setting, trial.seed, trial.rounds) == ("noniid", SEEDS[0], 60)
        if is_first and "problem" not in row and max(row["accuracy"][:45]) > 0.79:
            changes = dict(trial.settings)
            self.waiting.insert(0, Trial.of(changes, "noniid", SEEDS[1]))
            self.waiting.insert(0, Trial.of(changes, "iid", SEEDS[0]))

    def next_trial(self) -> Trial:
        """Return the next run."""
        if not self.is_final and self.share > 0.55:
            self.is_final = True
            self.waiting = list(finals(self.best(10)))
        if self.waiting:
            return self.waiting.pop(0)
        while True:
            pool = self.best(10) if self.share > 0.25 else []
            changes = self.changed(self.draw.choice(pool)) if pool else self.random()
            trial = Trial.of(changes, "noniid", SEEDS[0])
            if trial not in self.tried:
                self.tried.add(trial)
                return trial

    def random(self) -> Settings:
        """Draw settings: each is that of NEAR with probability 1/2, if that has it."""
        return NEAR | {
            key: self.draw.choice(values)
            for key, values in SPACE.items()
            if self.draw.random() < 0.5
        }

    def changed(self, settings: Settings) -> Settings:
        """Change one to three settings."""
        chosen = self.draw.sample(list(SPACE), self.draw.choice((1, 2, 3)))
        return settings | {key: self.draw.choice(SPACE[key]) for key in chosen}

    def best(self, n: int) -> list[Settings]:
        """Return the settings with the best scores among those with all three short runs."""
        groups: dict[str, list[Row]] = {}
        for row in self.rows:
            if row["algorithm"] == "sift-common-variant" and "problem" not in row:
                groups.setdefault(json.dumps(row["settings"], sort_keys=True), []).append(row)
        scored = [
            (score(rows), key)
            for key, rows in groups.items()
            if {(row["setting"], row["seed"]) for row in rows}
            >= {("noniid", SEEDS[0]), ("noniid", SEEDS[1]), ("iid", SEEDS[0])}
        ]
        return [json.loads(key) for _, key in sorted(scored)[:n]]

    def write(self) -> None:
        """Write all rows."""
        found = {"commit": commit(), "seconds": time.monotonic() - self.start, "rows": self.rows}
        part = self.arguments.out.with_suffix(".part")
        part.write_text(json.dumps(found), encoding="utf-8")
        part.replace(self.arguments.out)


def baselines() -> Iterator[Trial]:
    """Yield the runs of the methods to compare with."""
    for seed in (*SEEDS, *FINAL_SEEDS):
        for setting in ("noniid", "iid"):
            yield Trial("fedadam-ssm", (), setting, seed, LONG)
    for setting in ("noniid", "iid"):
        yield Trial("sift", (), setting, FINAL_SEEDS[0], LONG)


def leads() -> Iterator[Trial]:
    """Yield the runs of settings that are worth a look."""
    for changes in LEADS:
        yield Trial.of(changes, "noniid", SEEDS[0])


def finals(chosen: Sequence[Settings]) -> Iterator[Trial]:
    """Yield long runs with other seeds, first of the best settings."""
    for settings in chosen:
        for seed in FINAL_SEEDS:
            for setting in ("noniid", "iid"):
                yield Trial.of(settings, setting, seed, LONG)


def score(rows: Sequence[Row]) -> float:
    """Return a score of settings, lower is better: bytes to the target and accuracy at the end."""
    of = {"iid": list[float](), "noniid": list[float]()}
    for row in rows:
        target, accuracy = TARGETS[row["setting"]], row["accuracy"]
        hit = next((n for n, x in enumerate(accuracy) if x >= target), None)
        up = row["secure"][-1] * 1.5 if hit is None else row["secure"][hit]
        of[row["setting"]].append(math.log(up) - 15 * fmean(accuracy[-3:]))
    return fmean(of["iid"]) + fmean(of["noniid"])


def prepare_worker(devices: Queue[tuple[str, int]]) -> None:
    """Choose the device, and compute the bytes of the protocol before the first trial."""
    DEVICE[0], core = devices.get()
    if core:
        os.sched_setaffinity(0, {core % (os.cpu_count() or 1)})
    torch.set_num_threads(1)
    protocol_bytes()


DEVICE = ["auto"]
"""The device of this process."""


def split(setting: str, seed: int) -> tuple[list[Any], Any, Any]:
    """Return the clients' data, the held-out tenth of the training data, and an image's shape."""
    dataset = data.load("fashion-mnist")
    x, y = dataset.train
    order = torch.from_numpy(stream(seed, "validation").permutation(len(x)))
    held_out, rest = order[: len(x) // 10], order[len(x) // 10 :]
    labels = y[rest].numpy()
    if setting == "iid":
        shares = data.iid(labels, clients=CLIENTS, seed=seed)
    else:
        shares = data.dirichlet(labels, clients=CLIENTS, seed=seed, theta=0.1)
    clients = [(x[rest[share]], y[rest[share]]) for share in shares]
    return clients, (x[held_out], y[held_out]), dataset.shape


@cache
def data_of(setting: str, seed: int) -> tuple[list[Any], Any, Any]:
    """Return the clients' data, the held-out data, and an image's shape."""
    if setting != "vgg":
        return split(setting, seed)
    dataset = data.load("cifar-10")
    x, y = dataset.train
    order = torch.from_numpy(stream(seed, "validation").permutation(len(x)))
    held_out, rest = order[: len(x) // 10], order[len(x) // 10 :]
    shares = data.iid(y[rest].numpy(), clients=CLIENTS, seed=seed)
    clients = [(x[rest[share]], y[rest[share]]) for share in shares]
    return clients, (x[held_out], y[held_out]), dataset.shape


def train(trial: Trial, deadline: float = math.inf) -> Row:
    """Train, and return what was measured after each round."""
    began = time.perf_counter()
    clients, held_out, shape = data_of(trial.setting, trial.seed)
    algorithm = algorithm_of(trial)
    is_vgg = trial.setting == "vgg"
    model = models.build("vgg11" if is_vgg else "cnn", shape, seed=trial.seed)
    on_gpu = torch.cuda.is_available() and DEVICE[0] != "cpu"
    precision = ("bf16" if is_vgg else "tf32") if on_gpu else "fp32"
    options = Options(batch_size=64, seed=trial.seed, device=DEVICE[0], precision=precision)
    federation = prepare(model, clients, held_out, algorithm, options)
    frames: Frames = {}
    if trial.algorithm == "sift-common-variant":
        federation = replace(federation, on_upload=counter_of(frames))
    row: Row = {"accuracy": [], "up": [], "down": [], "commit": commit()}
    start = initial_snapshot(federation)
    try:
        for _, record in run_rounds(federation, start, trial.rounds):
            row["accuracy"].append(round(record["accuracy"], 4))
            row["up"].append(round(record["uplink_bytes"]))
            row["down"].append(round(record["downlink_bytes"] - start.traffic.downlink_bytes))
            if time.monotonic() > deadline:
                break
    except Diverged as problem:
        row["problem"] = str(problem)
    if frames:
        row["secure"] = secure_bytes(frames, algorithm, federation.task.layout.d)
    return row | {
        "device": str(federation.task.device),
        "seconds": round(time.perf_counter() - began, 1),
    }


def algorithm_of(trial: Trial) -> algorithms.Algorithm:
    """Return the method of a run with its settings."""
    if trial.algorithm == "sift-common-variant":
        return sift_common_variant(**dict(trial.settings))
    return {"fedadam-ssm": algorithms.fedadam_ssm, "sift": algorithms.sift}[trial.algorithm]()


def counter_of(frames: Frames) -> Any:
    """Return a function that counts a round's frames without the masked values."""

    def count(specs: Sequence[Spec], update: Update, sizes: Sequence[int]) -> None:
        rest = tuple(part for part in update.parts if "p" not in part.values)
        size = sum(encoded_sizes(Update(rest, update.weights), specs))
        frames[specs[0].round] = frames.get(specs[0].round, 0) + size

    return count


def secure_bytes(frames: Frames, algorithm: algorithms.Algorithm, d: int) -> list[int]:
    """Return the bytes per client up to each round with secure aggregation, without losses."""
    protocol, total, found = iter(protocol_bytes()), 0.0, []
    given = algorithm.settings
    width = bits_for(CLIENTS * (given["largest"] or Integer(given["bits"]).largest))
    for round, size in frames.items():
        total += size / CLIENTS
        if algorithm.phase(round).summed:
            k = num_kept(density_in(given, round), d)
            with_v = math.ceil(k / given["v_rounds"]) if given["v_rounds"] else 0
            total += next(protocol) + packed_size(k + with_v, width)
        found.append(math.ceil(total))
    return found


def density_in(given: Mapping[str, Any], round: int) -> float:
    """Return the density of a round."""
    is_late = given["late_density"] and round > given["late_round"]
    return float(given["late_density" if is_late else "density"])


@cache
def protocol_bytes() -> list[float]:
    """Return the bytes up per client and round of the protocol, without values and losses."""
    server = SecureServer(bytes(8), SecureSettings())
    clients = [SecureClient(bytes(8), number, 1) for number in range(CLIENTS)]
    found = []
    for round in range(1, 4):
        sizes = StageBytes()

        def ask(request: Request) -> Replies:
            zeros = np.zeros(0, np.int64)
            return {
                u: reply_of(clients[u], request.stage, message, lambda: zeros)
                for u, message in request.messages.items()
            }

        run_exchange(server, round, range(CLIENTS), 0, 1, ask, sizes)
        found.append(sum(sizes.up.values()) / CLIENTS)
    return [*found, *[found[-1]] * LONG]


def check() -> None:
    """Compare the count with a real secure run, and its model with the run in the clear."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(400, 1, 28, 28, generator=draw), torch.arange(400) % 10
    clients = [(x[n::CLIENTS], y[n::CLIENTS]) for n in range(CLIENTS)]
    ends = []
    for is_secure in (False, True):
        algorithm = sift_common_variant(skip=0, local_steps=1, bits=3)
        options = Options(batch_size=20, device="cpu", secure=is_secure)
        model = models.build("cnn", (1, 28, 28), seed=0)
        federation, frames = prepare(model, clients, None, algorithm, options), Frames()
        federation = replace(federation, on_upload=counter_of(frames))
        if is_secure:
            federation = replace(federation, on_upload=lambda *of: None)
        steps = list(run_rounds(federation, initial_snapshot(federation), 4))
        counted = [record["uplink_bytes"] for _, record in steps]
        if not is_secure:
            expected = secure_bytes(frames, algorithm, federation.task.layout.d)
        ends.append(steps[-1][0].state.w)
    print("counted", expected, "real", counted, "equal models", torch.equal(*ends))
    assert all(abs(a - b) < 1 for a, b in zip(expected, counted, strict=True))
    assert torch.equal(*ends)


if __name__ == "__main__":
    main()

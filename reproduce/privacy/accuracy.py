"""Accuracy against ε: `python reproduce/privacy/accuracy.py`.

1,000 clients with 60 images of Fashion-MNIST each train the paper's CNN. In each of 20 rounds,
every client takes part with probability 0.1 and takes 5 steps. δ is 1e-5.

1. Each method gets the same number of trials with ε = 4 on a validation split: 10,000 training
   images on which no client trains. The first trial has the method's own learning rate, and half
   of the median norm of 20 clients' updates as clip. From the best trial so far, one setting at a
   time is made larger or smaller, until no neighbor is better or the trials are spent.
2. The best settings train with other seeds on all 60,000 images, and are judged on the test set:
   with every budget, and without clips and noise.
3. Variants of sift_common with ε = 4: other densities, of which 1 has noise on all coordinates, and
   the last model instead of the averaged one.

Writes settings.csv, accuracy.csv and variants.csv next to this file after every run. What is in
them is not trained again. Needs Fashion-MNIST in FEDSIFT_DATA, and about 6 seconds per run on one
core of a quiet machine.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

import fedsift
from fedsift import data, models
from fedsift.algorithms import Algorithm, fedadam, fedavg, sift_common
from fedsift.engine.contract import ClientResult, Results
from fedsift.errors import Diverged
from fedsift.privacy import DifferentialPrivacy
from fedsift.privacy.differential import private_roles
from fedsift.runs.run import commit
from fedsift.seeding import stream

HERE = Path(__file__).parent
CLIENTS, PARTICIPATION, ROUNDS, STEPS, BATCH, DELTA = 1000, 0.1, 20, 5, 16, 1e-5
VALIDATION, SEEDS = 10_000, (1, 2, 3)
EPSILONS = ("4", "1", "none", "8", "2")
"""The budgets, the most important one first."""
TUNED_AT, TRIALS = "4", 6
"""The budget with which settings are chosen, and the number of trials."""
VARIANTS = ({"density": 0.03}, {"density": 0.1}, {"density": 0.3}, {"density": 1.0}, {"average": 0})
FACTORS = {"lr": 2.0, "clip": 2.0, "moments": 4.0, "density": 3.0}
"""How much larger or smaller a setting is in a neighboring trial."""
Row = dict[str, Any]
Settings = Mapping[str, float]


@dataclass(frozen=True)
class Method:
    """A method, and the settings of its first trial.

    ``clip`` is a multiple of the typical norm of W, or of what is sent; ``moments`` of M and V.
    """

    make: Callable[[Settings], Algorithm]
    first: Settings


def private_sift_common(settings: Settings) -> Algorithm:
    """Return sift_common with a mask from earlier sums."""
    lr, density, average = settings["lr"], settings["density"], settings.get("average", 0.05)
    return sift_common(density, average=average, nominate=False, local_steps=STEPS, lr=lr)


METHODS = {
    "fedavg": Method(lambda s: fedavg(local_steps=STEPS, lr=s["lr"]), {"lr": 0.2, "clip": 0.5}),
    "fedadam": Method(
        lambda s: fedadam(local_steps=STEPS, lr=s["lr"]),
        {"lr": 0.001, "clip": 0.5, "moments": 0.5},
    ),
    "sift-common": Method(private_sift_common, {"density": 0.3, "lr": 0.004, "clip": 0.5}),
}


@dataclass
class Table:
    """Rows in a file, by the columns that identify a run."""

    path: Path
    key: tuple[str, ...]
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.path.exists():
            with self.path.open(encoding="utf-8", newline="") as file:
                self.rows = list(csv.DictReader(file))

    def row(self, about: Row, run: Callable[[], Row]) -> Row:
        """Return the row of a run; if there is none, run it and write the table."""
        about = {name: text(x) for name, x in about.items()}
        for row in self.rows:
            if all(row.get(name, "") == about.get(name, "") for name in self.key):
                return row
        self.rows.append(about | {name: text(x) for name, x in run().items()})
        print(self.rows[-1], flush=True)
        with self.path.open("w", encoding="utf-8", newline="") as file:
            names = list(dict.fromkeys(name for row in self.rows for name in row))
            writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)
        return self.rows[-1]


def text(x: object) -> str:
    """Return a cell: numbers in at most six digits."""
    return f"{x:.6g}" if isinstance(x, float) else str(x)


class Study:
    """The tables in a folder, and the device of all runs."""

    def __init__(self, folder: Path, device: str) -> None:
        tried = ("method", "budget", *FACTORS)
        self.settings = Table(folder / "settings.csv", tried)
        self.accuracy = Table(folder / "accuracy.csv", ("method", "budget", "seed"))
        self.variants = Table(folder / "variants.csv", (*tried, "average", "seed"))
        self.device, self.images = device, data.load("fashion-mnist")
        self.norms: dict[str, Mapping[str, float]] = {}

    def run(self) -> None:
        """Choose settings and judge them, the most important runs first."""
        for seed in SEEDS:
            for budget in EPSILONS:
                for name in METHODS:
                    self.judge(name, budget, seed)
            for change in VARIANTS if seed == SEEDS[0] else ():
                self.vary("sift-common", TUNED_AT, seed, change)

    def chosen(self, name: str) -> Settings:
        """Return the best settings on the validation split."""
        best = METHODS[name].first
        best_accuracy, seen, left = self.tried(name, best), [best], [*neighbors(best)]
        while left and len(seen) < TRIALS:
            seen.append(left.pop(0))
            accuracy = self.tried(name, seen[-1])
            if accuracy > best_accuracy:
                best, best_accuracy = seen[-1], accuracy
                left = [x for x in neighbors(best) if x not in seen]
        return best

    def tried(self, name: str, settings: Settings) -> float:
        """Return the accuracy of settings on the validation split."""
        row = self.settings.row(
            {"method": name, "budget": TUNED_AT, **settings},
            lambda: self.trained(name, TUNED_AT, settings, self.federation(0, is_validation=True)),
        )
        return float(row["accuracy"])

    def judge(self, name: str, budget: str, seed: int) -> Row:
        """Train the chosen settings on all images, and test them."""
        settings = self.chosen(name)
        return self.accuracy.row(
            {"method": name, "budget": budget, "seed": seed, **settings},
            lambda: self.trained(name, budget, settings, self.federation(seed)),
        )

    def vary(self, name: str, budget: str, seed: int, change: Settings) -> Row:
        """Train a variant of a method with the settings that were chosen for it."""
        settings = {**self.chosen(name), **change}
        return self.variants.row(
            {"method": name, "budget": budget, "seed": seed, **settings},
            lambda: self.trained(name, budget, settings, self.federation(seed)),
        )

    def federation(self, seed: int, is_validation: bool = False) -> Row:
        """The arguments of a simulation: the model, the clients and the test set."""
        (x, y), test = self.images.train, self.images.test
        if is_validation:
            order = torch.from_numpy(stream(seed, "validation").permutation(len(x)))
            held, rest = order[:VALIDATION], order[VALIDATION:]
            test, x, y = (x[held], y[held]), x[rest], y[rest]
        parts = data.iid(y.numpy(), clients=CLIENTS, seed=seed)
        return {
            "model": models.build("cnn", self.images.shape, seed=seed),
            "clients": [(x[rows], y[rows]) for rows in parts],
            "test": test,
            "seed": seed,
            "batch_size": BATCH,
            "participation": PARTICIPATION,
            "rounds": ROUNDS,
            "weights": "equal",
            "evaluate_every": ROUNDS,
            "device": self.device,
        }

    def trained(self, name: str, budget: str, settings: Settings, given: Row) -> Row:
        """Train, and return what a table shows of the result."""
        algorithm, privacy = METHODS[name].make(settings), None
        if budget != "none":
            clip = clips(settings, self.typical_norms(algorithm))
            privacy = DifferentialPrivacy(clip, epsilon=float(budget), delta=DELTA)
        began = time.process_time()
        try:
            result = fedsift.simulate(algorithm=algorithm, privacy=privacy, progress=False, **given)
        except Diverged as problem:
            return {"accuracy": 0.0, "problem": str(problem), "commit": commit()}
        return {
            **measured(result),
            **(spent(result, algorithm, privacy) if privacy else {}),
            "cpu_seconds": round(time.process_time() - began, 1),
            "device": torch.cuda.get_device_name() if result.snapshot.state.w.is_cuda else "cpu",
            "commit": commit(),
        }

    def typical_norms(self, algorithm: Algorithm) -> Mapping[str, float]:
        """Return the typical norms of clients' updates, computed once per method and settings."""
        if repr(algorithm) not in self.norms:
            given = self.federation(0, is_validation=True)
            self.norms[repr(algorithm)] = typical_norms(algorithm, given)
        return self.norms[repr(algorithm)]


def measured(result: fedsift.Result) -> Row:
    """The quality of a model, and its traffic per client without the initial model."""
    last, initial = result.history[-1], result.history[0]["downlink_bytes"]
    return {
        "accuracy": last["accuracy"],
        "loss": last["loss"],
        "up_bytes": last["uplink_bytes"],
        "down_bytes": last["downlink_bytes"] - initial,
    }


def spent(result: fedsift.Result, algorithm: Algorithm, privacy: DifferentialPrivacy) -> Row:
    """The clips, the noise, and the number of values that get noise."""
    roles, layout = private_roles(algorithm, privacy), algorithm.layout_for(result.layout)
    return {
        **{f"clip_{role}": bound for role, bound in privacy.bounds.items()},
        "noise": result.settings["dp_noise"],
        "noisy_values": sum(layout.length(role) for role in roles),
        "epsilon": result.history[-1]["epsilon"],
    }


def neighbors(settings: Settings) -> Iterator[Settings]:
    """Yield settings with one of them larger or smaller, in the order in which they are tried.

    >>> list(neighbors({"lr": 0.5}))
    [{'lr': 1.0}, {'lr': 0.25}]
    """
    for name, x in settings.items():
        for y in (x * FACTORS[name], x / FACTORS[name]):
            if name != "density" or y <= 1:
                yield {**settings, name: y}


def clips(settings: Settings, norms: Mapping[str, float]) -> dict[str, float]:
    """Return the bounds on clients' updates, in three digits."""
    factors = {role: settings["clip" if role in "wp" else "moments"] for role in norms}
    return {role: float(f"{factors[role] * norm:.3g}") for role, norm in norms.items()}


def typical_norms(algorithm: Algorithm, given: Row) -> dict[str, float]:
    """The median norm of 20 clients' updates in round 1, by vector.

    A method with a mask has none in round 1, so its norms are those of round 3.
    """
    run = fedsift.rounds(algorithm=algorithm, **{**given, "participation": 20 / CLIENTS})
    while run.snapshot.round < (2 if "c" in algorithm.state else 0):
        next(run)
    norms: dict[str, list[float]] = {}
    for reply in run.federation.engine.train(run.federation.job_after(run.snapshot)):
        assert isinstance(reply, ClientResult | Results)
        for part in reply.update.parts:
            for role, coded in part.values.items():
                norms.setdefault(role, []).extend(coded.restore().norm(dim=-1).tolist())
    return {role: median(found) for role, found in norms.items()}


def main() -> None:
    """Choose the settings, then test them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=HERE)
    arguments = parser.parse_args()
    Study(arguments.out, arguments.device).run()


if __name__ == "__main__":
    main()

"""Accuracy against ε: `python reproduce/privacy/accuracy.py --device cuda`.

1,000 clients with 60 images of Fashion-MNIST each train the paper's CNN. In each of 40 rounds,
every client takes part with probability 0.1 and takes 10 steps. δ is 1e-5.

Settings are chosen with ε = 4 on a validation split: 10,000 training images on which no client
trains. Every method gets the same number of configurations: three learning rates, and two clips,
which are multiples of the median norm of 20 clients' updates in round 1, or for sift_common in
round 3, as it has no mask before. It sends a tenth of the coordinates, without nominations. Then
the best settings train with other seeds on all 60,000 images, and are judged on the test set.

Writes settings.csv and accuracy.csv next to this file. What is in them is not trained again. Needs
Fashion-MNIST in FEDSIFT_DATA; several hours on two cores, minutes on a GPU.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

import fedsift
from fedsift import data, models
from fedsift.algorithms import Algorithm, fedadam, fedavg, sift_common
from fedsift.privacy import DifferentialPrivacy
from fedsift.privacy.differential import private_roles
from fedsift.runs.run import commit
from fedsift.seeding import stream

HERE = Path(__file__).parent
CLIENTS, PARTICIPATION, ROUNDS, STEPS, BATCH, DELTA = 1000, 0.1, 40, 10, 32, 1e-5
VALIDATION, TUNED_AT, SEEDS = 10_000, 4.0, (1, 2)
EPSILONS = (1.0, 2.0, 4.0, 8.0, None)
FACTORS = (0.5, 1.0)
DENSITY = 0.1
DEVICE = ["auto"]
"""The device of all runs."""
METHODS: Mapping[str, tuple[Callable[[float], Algorithm], tuple[float, ...]]] = {
    "fedavg": (lambda lr: fedavg(local_steps=STEPS, lr=lr), (0.05, 0.1, 0.2)),
    "fedadam": (lambda lr: fedadam(local_steps=STEPS, lr=lr), (0.0003, 0.001, 0.003)),
    "sift-common": (lambda lr: private_sift_common(lr), (0.001, 0.002, 0.004)),
}
Row = dict[str, Any]
Federation = dict[str, Any]


def private_sift_common(lr: float) -> Algorithm:
    """Return sift_common with a mask from earlier sums."""
    return sift_common(density=DENSITY, nominate=False, local_steps=STEPS, lr=lr)


def federation(seed: int, is_validation: bool) -> Federation:
    """The arguments of a simulation: the model, the clients and the test set."""
    images = data.load("fashion-mnist")
    (x, y), test = images.train, images.test
    if is_validation:
        order = torch.from_numpy(stream(seed, "validation").permutation(len(x)))
        held, rest = order[:VALIDATION], order[VALIDATION:]
        test, x, y = (x[held], y[held]), x[rest], y[rest]
    parts = data.iid(y.numpy(), clients=CLIENTS, seed=seed)
    return {
        "model": models.build("cnn", images.shape, seed=seed),
        "clients": [(x[rows], y[rows]) for rows in parts],
        "test": test,
        "seed": seed,
        "batch_size": BATCH,
        "participation": PARTICIPATION,
        "rounds": ROUNDS,
        "weights": "equal",
        "evaluate_every": ROUNDS,
        "device": DEVICE[0],
    }


def typical_norms(algorithm: Algorithm, given: Federation) -> dict[str, float]:
    """The median norm of 20 clients' updates in round 1, or the first with a mask, by vector."""
    run = fedsift.rounds(algorithm=algorithm, **{**given, "participation": 20 / CLIENTS})
    while run.snapshot.round < (2 if "c" in algorithm.state else 0):
        next(run)
    norms: dict[str, list[float]] = {}
    for reply in run.federation.engine.train(run.federation.job_after(run.snapshot)):
        for part in reply.update.parts:
            for role, coded in part.values.items():
                norms.setdefault(role, []).append(float(coded.restore().norm()))
    return {role: median(found) for role, found in norms.items()}


def privacy_of(norms: Mapping[str, float], factor: float, epsilon: float) -> DifferentialPrivacy:
    """The privacy with a multiple of the typical norms as clip."""
    clip = {role: factor * norm for role, norm in norms.items()}
    return DifferentialPrivacy(clip, epsilon=epsilon, delta=DELTA)


def trained(given: Federation, algorithm: Algorithm, privacy: DifferentialPrivacy | None) -> Row:
    """Train, and return what a table shows of the result."""
    result = fedsift.simulate(algorithm=algorithm, privacy=privacy, progress=False, **given)
    last = result.history[-1]
    roles = private_roles(algorithm, privacy) if privacy else ()
    layout = algorithm.layout_for(result.layout)
    values = sum(layout.length(role) for role in roles)
    return {
        "accuracy": round(last["accuracy"], 4),
        "epsilon": round(last["epsilon"], 4) if privacy else "",
        "noise": round(result.settings["dp_noise"], 4) if privacy else "",
        "noisy_values": values or "",
        "seconds": round(last["seconds"], 1),
        "device": torch.cuda.get_device_name() if result.snapshot.state.w.is_cuda else "cpu",
        "commit": commit(),
    }


def choose(name: str) -> list[Row]:
    """Train every configuration of a method on the validation split."""
    make, rates = METHODS[name]
    given = federation(0, is_validation=True)
    rows = []
    for lr in rates:
        norms = typical_norms(make(lr), given)
        for factor in FACTORS:
            clips = {f"clip_{role}": f"{factor * norm:.3g}" for role, norm in norms.items()}
            found = trained(given, make(lr), privacy_of(norms, factor, TUNED_AT))
            rows.append({"method": name, "lr": lr, "factor": factor, **clips, **found})
            print(rows[-1], flush=True)
    return rows


def judge(name: str, best: Row) -> list[Row]:
    """Train the chosen settings with each budget and seed, and test them."""
    algorithm = METHODS[name][0](float(best["lr"]))
    clip = {key[5:]: float(x) for key, x in best.items() if key.startswith("clip_") and x}
    rows = []
    for seed in SEEDS:
        given = federation(seed, is_validation=False)
        for epsilon in EPSILONS:
            privacy = DifferentialPrivacy(clip, epsilon=epsilon, delta=DELTA) if epsilon else None
            found = trained(given, algorithm, privacy)
            rows.append({"method": name, "budget": epsilon or "none", "seed": seed, **found})
            print(rows[-1], flush=True)
    return rows


def table(path: Path, make_rows: Callable[[str], list[Row]]) -> list[Row]:
    """Read a table, add the methods that it lacks, and write it."""
    rows: list[Row] = list(csv.DictReader(path.open(encoding="utf-8"))) if path.exists() else []
    for name in METHODS:
        if name not in {row["method"] for row in rows}:
            rows += make_rows(name)
            keys = list(dict.fromkeys(key for row in rows for key in row))
            with path.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, keys, restval="", lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
    return rows


def main() -> None:
    """Choose the settings, then test them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=HERE)
    arguments = parser.parse_args()
    DEVICE[0], out = arguments.device, arguments.out
    tried = table(out / "settings.csv", choose)

    def judged(name: str) -> list[Row]:
        ours = [row for row in tried if row["method"] == name]
        return judge(name, max(ours, key=lambda row: float(row["accuracy"])))

    table(out / "accuracy.csv", judged)


if __name__ == "__main__":
    sys.exit(main())

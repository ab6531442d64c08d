"""Choose the defaults of sift_common on a validation split of Fashion-MNIST's training data.

    python reproduce/sift/choose_common.py

A tenth of the training images is held out from all clients and takes the place of the test set,
which is not read. Every candidate trains for 16 rounds with IID data and 40 rounds with Dirichlet
0.1, with a seed that the reported runs do not have. The table common_validation.csv, next to this
file, is rewritten after each run; a run that is in it is not repeated.
"""

from __future__ import annotations

import csv
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import fedsift
from fedsift import data, models
from fedsift.seeding import stream

TABLE = Path(__file__).with_name("common_validation.csv")
HEADER = (
    "setting", "changes", "rounds", "accuracy", "round_to_target", "up_to_target",
    "down_to_target", "seconds",
)  # fmt: skip
SEED = 100
TARGETS = {"iid": 0.804, "noniid": 0.798}
ROUNDS = {"iid": 16, "noniid": 40}
CANDIDATES: list[dict[str, Any]] = [
    {"ahead": ahead, "momentum": momentum}
    for ahead, momentum in (
        (0.5, 0.5), (0.7, 0.8), (0.5, 0.8), (1.0, 0.5), (0.0, 0.5), (0.3, 0.8), (1.0, 0.8),
    )
]  # fmt: skip


def main() -> None:
    """Train every candidate that is not in the table, in both settings."""
    rows = read_table()
    done = {(row["setting"], row["changes"]) for row in rows}
    for changes in CANDIDATES:
        for setting in ROUNDS:
            if (setting, json.dumps(changes)) not in done:
                rows.append(trial(setting, changes))
                write_table(rows)
                print(rows[-1], flush=True)


def trial(setting: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Train one candidate, and return its row."""
    start = time.perf_counter()
    clients, held_out, shape = split(setting)
    history = fedsift.simulate(
        models.build("cnn", shape, seed=SEED), clients, held_out,
        algorithm=fedsift.algorithms.sift_common(**changes),
        rounds=ROUNDS[setting], batch_size=64, seed=SEED, device="cpu", progress=False,
    ).history  # fmt: skip
    hit = next((x for x in history if x["accuracy"] >= TARGETS[setting]), None)
    return {
        "setting": setting,
        "changes": json.dumps(changes),
        "rounds": ROUNDS[setting],
        "accuracy": round(history[-1]["accuracy"], 4),
        "round_to_target": hit and hit["round"],
        "up_to_target": hit and round(hit["uplink_bytes"]),
        "down_to_target": hit and round(hit["downlink_bytes"] - history[0]["downlink_bytes"]),
        "seconds": round(time.perf_counter() - start),
    }


def split(setting: str) -> tuple[list[Any], Any, Any]:
    """Return the clients' data, the held-out tenth of the training data, and an image's shape."""
    dataset = data.load("fashion-mnist")
    x, y = dataset.train
    order = torch.from_numpy(stream(SEED, "validation").permutation(len(x)))
    held_out, rest = order[: len(x) // 10], order[len(x) // 10 :]
    labels = y[rest].numpy()
    if setting == "iid":
        shares = data.iid(labels, clients=20, seed=SEED)
    else:
        shares = data.dirichlet(labels, clients=20, seed=SEED, theta=0.1)
    clients = [(x[rest[share]], y[rest[share]]) for share in shares]
    return clients, (x[held_out], y[held_out]), dataset.shape


def read_table() -> list[dict[str, Any]]:
    """Return the rows of the table; none if it does not exist."""
    if not TABLE.exists():
        return []
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_table(rows: list[dict[str, Any]]) -> None:
    """Write all rows."""
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, HEADER, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()

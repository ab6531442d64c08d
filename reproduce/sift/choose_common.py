"""Choose the defaults of sift_common on a validation split of Fashion-MNIST's training data.

    python reproduce/sift/choose_common.py

A tenth of the training images is held out from all clients and takes the place of the test set,
which is not read. The seeds differ from those of the reported runs. The table
common_validation.csv, next to this file, is rewritten after each run; a run that is in it is not
repeated. It has the commit of each run. ``secure_up_to_target`` are the bytes that a secure sum
takes up to the target, without its keys: each number takes as many bits as the sum of 20 clients
can have.
"""

from __future__ import annotations

import csv
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import fedsift
from fedsift import data, models
from fedsift.algorithms.sift_common import Sizes
from fedsift.codec.values import Integer
from fedsift.runs.run import commit
from fedsift.schedules import parse_schedule
from fedsift.seeding import stream

TABLE = Path(__file__).with_name("common_validation.csv")
CLIENTS, D = 20, 21_840
TARGETS = {"iid": 0.804, "noniid": 0.798}
CHANGED = ("density", "bits", "ahead", "momentum")
MARKS = (16, 40, 60, 80)
BESIDES_NUMBERS = 197
"""Bytes per client and round of a secure sum besides the numbers, as counted with 20 clients."""
TRIALS = (
    ("iid", 80, 100, (0.02, 4, 0.7, 0.5)),
    ("noniid", 80, 100, (0.02, 4, 0.7, 0.5)),
    ("iid", 80, 100, (0.02, 4, 0.3, 0.5)),
    ("iid", 16, 100, (0.02, 4, 0.7, 0.8)),
    ("noniid", 40, 100, (0.02, 4, 0.7, 0.8)),
    ("noniid", 40, 100, (0.02, 4, 0.5, 0.8)),
    ("iid", 80, 100, (0.03, 3, 0.7, 0.5)),
    ("iid", 16, 100, (0.03, 3, 0.5, 0.7)),
    ("noniid", 60, 100, (0.03, 3, 0.5, 0.7)),
    ("iid", 40, 100, (0.03, 3, 0.7, 0.65)),
    ("noniid", 40, 100, (0.03, 3, 0.7, 0.65)),
    ("noniid", 60, 101, (0.03, 3, 0.7, 0.65)),
    ("noniid", 60, 101, (0.03, 3, 0.3, 0.65)),
    ("noniid", 60, 101, (0.03, 3, "linear(0.7, 0.0, rounds=40)", 0.65)),
    ("iid", 60, 101, (0.03, 3, "linear(0.7, 0.0, rounds=40)", 0.5)),
    ("iid", 20, 101, (0.03, 3, "linear(0.7, 0.0, rounds=40)", 0.65)),
    ("iid", 20, 101, (0.03, 3, "linear(1.0, 0.0, rounds=40)", 0.65)),
    ("noniid", 20, 101, (0.03, 3, "linear(1.0, 0.0, rounds=40)", 0.65)),
)
"""Setting, rounds, seed, and the values of the changed settings."""
Row = dict[str, Any]


def main() -> None:
    """Train every trial that is not in the table."""
    rows = read_table()
    done = {tuple(row[key] for key in ("setting", "rounds", "seed", *CHANGED)) for row in rows}
    for setting, rounds, seed, values in TRIALS:
        if (setting, str(rounds), str(seed), *map(str, values)) not in done:
            rows.append(trial(setting, rounds, seed, dict(zip(CHANGED, values, strict=True))))
            write_table(rows)
            print(rows[-1], flush=True)


def trial(setting: str, rounds: int, seed: int, changes: dict[str, Any]) -> Row:
    """Train with some settings, and return the row."""
    start = time.perf_counter()
    clients, held_out, shape = split(setting, seed)
    given = {k: parse_schedule(x) if isinstance(x, str) else x for k, x in changes.items()}
    history = fedsift.simulate(
        models.build("cnn", shape, seed=seed), clients, held_out,
        algorithm=fedsift.algorithms.sift_common(**given),
        rounds=rounds, batch_size=64, seed=seed, device="cpu", progress=False,
    ).history  # fmt: skip
    hit = next((x for x in history if x["accuracy"] >= TARGETS[setting]), None)
    accuracy = {x["round"]: round(x["accuracy"], 4) for x in history}
    return {
        "setting": setting,
        "rounds": rounds,
        "seed": seed,
        **changes,
        "round_to_target": hit and hit["round"],
        "up_to_target": hit and round(hit["uplink_bytes"]),
        "down_to_target": hit and round(hit["downlink_bytes"] - history[0]["downlink_bytes"]),
        "secure_up_to_target": hit and hit["round"] * secure_bytes(changes),
        **{f"accuracy_{mark}": accuracy.get(mark) for mark in MARKS},
        "seconds": round(time.perf_counter() - start),
        "commit": commit(),
    }


def secure_bytes(changes: dict[str, Any]) -> int:
    """Return the bytes per client and round of a secure sum, without its keys."""
    size = Sizes.of(D, changes["density"], CLIENTS)
    bits = math.ceil(math.log2(2 * CLIENTS * Integer(changes["bits"]).largest + 1))
    return math.ceil(size.numbers * bits / 8) + BESIDES_NUMBERS


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


def read_table() -> list[Row]:
    """Return the rows of the table; none if it does not exist."""
    if not TABLE.exists():
        return []
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_table(rows: list[Row]) -> None:
    """Write all rows."""
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()

"""How many bits the masks of real training runs take, against the limit for random ones.

    python benchmarks/masks.py cnn fashion-mnist --rounds 20 --out benchmarks/results/masks-cnn.json

Trains FedAdam-SSM at 5 % and at 1 % and measures every mask of a few rounds with each index
coder. The uniform limit is log2 C(d, k), what a uniformly random mask costs at least.
"""

import argparse
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedsift.codec.index import CODERS
from fedsift.codec.inspect import information_limit
from fedsift.codec.wire import counted
from fedsift.runs.config import RunConfig
from fedsift.runs.run import environment, federation_of


def measure(config: RunConfig, watched: list[int]) -> list[dict[str, float]]:
    """Bits a kept index by coder, as means over the clients, in the watched rounds."""
    sizes: dict[tuple[int, str], list[int]] = defaultdict(list)
    federation = federation_of(config)
    layout = federation.task.layout

    def watching(update, spec, limits):
        indices = update.parts[0].indices
        if spec.round in watched and limits.client is not None and indices is not None:
            found = indices[0].cpu().numpy()
            for coder in CODERS:
                size = coder.size(found, layout.d, layout.starts)
                sizes[spec.round, coder.name].append(8 * size)
            sizes[spec.round, "k"].append(len(found))
        return counted(update, spec, limits)

    federation = replace(federation, wire=watching)
    snapshot = federation.initial_snapshot()
    rows = []
    for round in range(1, max(watched) + 1):
        snapshot, _ = federation.run_round(snapshot)
        if round not in watched:
            continue
        k = sizes[round, "k"][0]
        limit = information_limit(layout.d, k)
        row = {"round": round, "density": config.settings["density"], "d": layout.d, "k": k}
        row["uniform_limit_bits"] = limit / k
        for coder in CODERS:
            row[f"{coder.name}_bits"] = float(np.mean(sizes[round, coder.name])) / k
        row["of_uniform_limit"] = row["entropy_bits"] / row["uniform_limit_bits"]
        accuracy, _ = federation.engine.evaluate(snapshot.state.w)
        row["accuracy"] = accuracy
        print({key: round_(value) for key, value in row.items()}, flush=True)
        rows.append(row)
    return rows


def round_(value):
    return round(value, 4) if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("dataset")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    watched = sorted({1, max(2, given.rounds // 4), given.rounds})
    rows = []
    for density in (0.05, 0.01):
        config = RunConfig(
            dataset=given.dataset, model=given.model, clients=given.clients, device=given.device,
            settings={"density": density},
        )  # fmt: skip
        rows += measure(config, watched)
    if given.out:
        about = {"model": given.model, "dataset": given.dataset, "seed": 0}
        about |= {"clients": given.clients, "environment": environment(config)}
        given.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The size of the masks of real training runs, compared with the limit for random masks.

    python benchmarks/masks.py cnn fashion-mnist --rounds 20 --out benchmarks/results/masks-cnn.json

Trains FedAdam-SSM at 5 % and at 1 % and encodes all masks of a few rounds with each index coder.
The uniform limit is log2 C(d, k), the entropy of a uniformly random mask.
"""

import argparse
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedsift.codec.index import INDEX_CODERS
from fedsift.codec.inspect import information_limit
from fedsift.codec.wire import SimulatedWire, send_counted
from fedsift.runs.config import RunConfig
from fedsift.runs.run import environment, federation_of


def measure(config: RunConfig, measured_rounds: list[int]) -> list[dict[str, float]]:
    """Bits per index by coder, as means over the clients, in the measured rounds."""
    sizes: dict[tuple[int, str], list[int]] = defaultdict(list)
    federation = federation_of(config)
    layout = federation.task.layout

    def measuring_wire(update, spec, limits):
        indices = update.parts[0].indices
        if spec.round in measured_rounds and limits.client is not None and indices is not None:
            found = indices[0].cpu().numpy()
            for coder in INDEX_CODERS:
                size = coder.size(found, layout.d, layout.starts)
                sizes[spec.round, coder.name].append(8 * size)
            sizes[spec.round, "k"].append(len(found))
        return send_counted(update, spec, limits)

    federation = replace(federation, wire=SimulatedWire(measuring_wire))
    snapshot = federation.initial_snapshot()
    rows = []
    for round in range(1, max(measured_rounds) + 1):
        snapshot, _ = federation.run_round(snapshot)
        if round not in measured_rounds:
            continue
        k = sizes[round, "k"][0]
        limit = information_limit(layout.d, k)
        row = {"round": round, "density": config.settings["density"], "d": layout.d, "k": k}
        row["uniform_limit_bits"] = limit / k
        for coder in INDEX_CODERS:
            row[f"{coder.name}_bits"] = float(np.mean(sizes[round, coder.name])) / k
        row["of_uniform_limit"] = row["entropy_bits"] / row["uniform_limit_bits"]
        accuracy, _ = federation.engine.evaluate(snapshot.state.w)
        row["accuracy"] = accuracy
        print({key: rounded(value) for key, value in row.items()}, flush=True)
        rows.append(row)
    return rows


def rounded(value):
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
    arguments = parser.parse_args()
    measured_rounds = sorted({1, max(2, arguments.rounds // 4), arguments.rounds})
    rows = []
    for density in (0.05, 0.01):
        config = RunConfig(
            dataset=arguments.dataset, model=arguments.model, clients=arguments.clients,
            device=arguments.device, settings={"density": density},
        )  # fmt: skip
        rows += measure(config, measured_rounds)
    if arguments.out:
        about = {"model": arguments.model, "dataset": arguments.dataset, "seed": 0}
        about |= {"clients": arguments.clients, "environment": environment(config)}
        arguments.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What the bytes of sift's frames are for, against the entropy of what they carry.

    python benchmarks/values.py --rounds 20 --out benchmarks/results/values-cnn.json

Trains sift on the CNN and Fashion-MNIST and weighs every upload of a few rounds. The limits are
log2 C(d, k) for a mask, and for values the entropy of their codes: without the table of their
frequencies, without scales and lengths. Real masks cluster and may take less than theirs.
"""

import argparse
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedsift.codec.inspect import bytes_by_part, information_limit
from fedsift.runs.config import RunConfig
from fedsift.runs.run import environment, federation_of


def entropy(codes: np.ndarray) -> float:
    """The bytes of codes at their own entropy."""
    counts = np.unique(codes, return_counts=True)[1]
    return float(-(counts * np.log2(counts / counts.sum())).sum() / 8)


def measure(config: RunConfig, watched: list[int]) -> list[dict[str, float]]:
    """Bytes of a frame by part and their limits, as means over the clients."""
    found: dict[int, Counter[str]] = {round: Counter() for round in watched}

    def watching(specs, update, sizes):
        if specs[0].round not in found:
            return
        counted = found[specs[0].round]
        counted.update(bytes_by_part(update, specs, sizes))
        counted.update({"uploads": len(sizes), "frame": sum(sizes)})
        (part,) = update.parts
        limit = information_limit(specs[0].layout.d, part.indices.shape[-1]) / 8
        counted["mask_limit"] += limit * len(sizes)
        for role, coded in part.values.items():
            counted[f"{role}_limit"] += sum(entropy(row) for row in coded.codes.codes.cpu().numpy())

    federation = replace(federation_of(config), on_upload=watching)
    snapshot = federation.initial_snapshot()
    for _ in range(max(watched)):
        snapshot, _ = federation.run_round(snapshot)
    return [
        {"round": round, **{name: total / uploads for name, total in counted.items()}}
        for round, counted in found.items()
        if (uploads := counted.pop("uploads"))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    config = RunConfig.from_values(
        {
            "algorithm": "sift", "dataset": "fashion-mnist", "model": "cnn", "clients": 10,
            "rounds": given.rounds,
            "partition": "dirichlet", "theta": 0.1, "device": given.device,
        }
    )  # fmt: skip
    rows = measure(config, sorted({1, max(2, given.rounds // 4), given.rounds}))
    for row in rows:
        print({name: round(value, 1) for name, value in row.items()})
    if given.out:
        about = {"config": config.flat(), "environment": environment(config), "rows": rows}
        given.out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()

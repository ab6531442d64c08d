"""The bytes of sift's frames by part, compared with the entropy of their content.

    python benchmarks/values.py --rounds 20 --out benchmarks/results/values-cnn.json

Trains sift on the CNN and Fashion-MNIST and measures all uploads of a few rounds. The limit is
log2 C(d, k) for a mask, and the entropy of the codes for values, without the table of
frequencies, scales and lengths. Real masks cluster and may be smaller than their limit.
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
    """The entropy of codes in bytes."""
    counts = np.unique(codes, return_counts=True)[1]
    return float(-(counts * np.log2(counts / counts.sum())).sum() / 8)


def measure(config: RunConfig, measured_rounds: list[int]) -> list[dict[str, float]]:
    """Bytes per frame by part and their limits, as means over the clients."""
    found: dict[int, Counter[str]] = {round: Counter() for round in measured_rounds}

    def record_upload(specs, update, sizes):
        if specs[0].round not in found:
            return
        counted = found[specs[0].round]
        counted.update(bytes_by_part(update, specs, sizes))
        counted.update({"uploads": len(sizes), "frame": sum(sizes)})
        (part,) = update.parts
        limit = information_limit(specs[0].layout.d, part.indices.shape[-1]) / 8
        counted["mask_limit"] += limit * len(sizes)
        for role, coded in part.values.items():
            codes = coded.quantized.codes.cpu().numpy()
            counted[f"{role}_limit"] += sum(entropy(row) for row in codes)

    federation = replace(federation_of(config), on_upload=record_upload)
    snapshot = federation.initial_snapshot()
    for _ in range(max(measured_rounds)):
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
    arguments = parser.parse_args()
    config = RunConfig.from_values(
        {
            "algorithm": "sift", "dataset": "fashion-mnist", "model": "cnn", "clients": 10,
            "rounds": arguments.rounds,
            "partition": "dirichlet", "theta": 0.1, "device": arguments.device,
        }
    )  # fmt: skip
    rows = measure(config, sorted({1, max(2, arguments.rounds // 4), arguments.rounds}))
    for row in rows:
        print({name: round(value, 1) for name, value in row.items()})
    if arguments.out:
        about = {"config": config.flat(), "environment": environment(config), "rows": rows}
        arguments.out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()

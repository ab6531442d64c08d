"""The growth of rounding errors in training, which is why engines are compared in float64.

    python benchmarks/sensitivity.py --out benchmarks/results/sensitivity.json

Trains the CNN on Fashion-MNIST twice on the same engine with 4 of 20 clients per round, the second
time from weights with a relative change of 1e-7, and prints the distances of W, M and V.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from fedsift.runs.config import RunConfig
from fedsift.runs.run import environment, federation_of


def distances(algorithm: str, rounds: int) -> list[dict[str, float]]:
    """Relative distances of W, M and V after each round."""
    values = {"dataset": "fashion-mnist", "algorithm": algorithm, "participation": 0.2}
    fed = federation_of(RunConfig.from_values({**values, "device": "cpu"}))
    plain = fed.initial_snapshot()
    noise = torch.randn(plain.state.w.shape, generator=torch.Generator().manual_seed(0))
    changed = replace(plain, state=plain.state.replace(w=plain.state.w * (1 + 1e-7 * noise)))
    rows = []
    for _ in range(rounds):
        plain, _ = fed.run_round(plain)
        changed, _ = fed.run_round(changed)
        pairs = zip("wmv", plain.state, changed.state, strict=True)
        row = {name: float((a - b).norm() / a.norm()) for name, a, b in pairs}
        rows.append({"round": plain.round, **row})
        print(algorithm, rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = {name: distances(name, 3) for name in ("fedadam-ssm", "fedadam")}
    if arguments.out:
        about = {"seed": 0, "environment": environment(RunConfig()), **results}
        arguments.out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()

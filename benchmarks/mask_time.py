"""The time to compute the masks of FedAdam-SSM, FedAdam-Top and Fairness-Top for one client.

python benchmarks/mask_time.py --out benchmarks/results/mask_time.json
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median

import torch

from fedsift.runs.config import RunConfig
from fedsift.runs.run import environment
from fedsift.selection.masks import num_kept, top_k, top_k_separate, top_k_union
from fedsift.vector import MOMENTS, State

MASKS = {
    "fedadam-ssm": lambda delta, k: top_k(delta.w, k),
    "fedadam-top": top_k_separate,
    "fairness-top": top_k_union,
}
SIZES = {"cnn": 21_840, "vgg11": 9_750_922}


def milliseconds(delta: State, k: int, repeats: int = 15) -> dict[str, float]:
    """The median time of each mask; the masks alternate."""
    times: dict[str, list[float]] = {name: [] for name in MASKS}
    for _ in range(repeats):
        for name, mask in MASKS.items():
            began = time.perf_counter()
            mask(delta, k)
            times[name].append(1e3 * (time.perf_counter() - began))
    return {name: median(spent) for name, spent in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    results = {}
    for name, d in SIZES.items():
        scales = (1e-2, 1e-3, 1e-6)
        delta = State.of(MOMENTS, (x * torch.randn(1, d, generator=draw) for x in scales))
        results[name] = milliseconds(delta, num_kept(0.05, d))
        print(name, {mask: f"{spent:.3g} ms" for mask, spent in results[name].items()})
    if arguments.out:
        content = {"environment": environment(RunConfig(device="cpu")), "milliseconds": results}
        arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Compare the masks with the best one: `python reproduce/theory/masks.py` (about 5 minutes).

Run reality.py first. FedAdam-SSM with the paper's settings, seed 0. For the updates of rounds 1, 4
and 8 and each client (for the large networks, the first 4), the weighted error of Theorem 1 under
each mask, relative to the certified minimum. The weights Γ, Λ, Θ are those of the theorem at l = L
with the constants of constants.csv, those of the sharper bound, and 1, 1, 1. Writes masks.csv.
Needs Fashion-MNIST in FEDSIFT_DATA.

The large networks, on a GPU and with CIFAR-10 there:
`--tasks vgg11-cifar10,resnet18-cifar10 --device cuda --out DIR`.
"""

import time
from pathlib import Path
from statistics import mean

from tables import HERE, read, replace_rows
from tasks import ORIGIN, TASKS, arguments, moved_to, origin

from fedsift.algorithms import fedadam_ssm
from fedsift.selection.masks import num_kept
from fedsift.theory.deviation import DeviationCoefficients, deviation_coefficients
from fedsift.theory.masks import Sparsification, mask_costs
from fedsift.theory.measured_deviation import client_updates
from fedsift.theory.sharper_bound import sharper_coefficients
from fedsift.vector import State

PAPER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6}
ROUNDS, DENSITIES = (1, 4, 8), (0.01, 0.05, 0.2)
LARGE, MAX_CLIENTS = 1_000_000, 4
"""With at least this many parameters, the solver is applied to this many clients only."""
HEADER = ("task", "weights", "round", "density", "clients", "W", "M", "V", "union", "best",
          "log_theta_over_gamma", "log_lambda_over_gamma", *ORIGIN)  # fmt: skip


def main() -> None:
    """Run all tasks, rounds, densities and sets of weights."""
    parsed = arguments(__doc__)
    for name in parsed.tasks:
        began = time.perf_counter()
        replace_rows(parsed.out / "masks.csv", HEADER, list(rows(name, parsed.device, parsed.out)))
        print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)


def rows(name: str, device: str, out: Path):
    """The rows of one task: means over the clients of the cost over the minimum."""
    task = moved_to(device, TASKS[name]())
    d, weights = task.layout.d, weights_of(name, task.layout.d, out)
    for number, delta in enumerate(client_updates(task, fedadam_ssm(**PAPER), max(ROUNDS)), 1):
        if number not in ROUNDS:
            continue
        clients = [State.of(delta.names, one) for one in zip(*delta, strict=True)]
        clients = clients[:MAX_CLIENTS] if d >= LARGE else clients
        for kind, w in weights.items():
            ratios = (w.log_theta - w.log_gamma, w.log_lambda - w.log_gamma)
            problems = [Sparsification(one, w) for one in clients]
            for density in DENSITIES:
                costs = [mask_costs(problem, num_kept(density, d)) for problem in problems]
                means = (f"{mean(c[m] for c in costs):.5f}" for m in costs[0])
                yield (name, kind, number, density, len(clients), *means,
                       *(f"{r:.3f}" for r in ratios), *origin(task))  # fmt: skip


def weights_of(name: str, d: int, out: Path) -> dict[str, DeviationCoefficients]:
    """Γ, Λ and Θ by the theorem, by the sharper bound, and equal."""
    table = [*read(HERE / "constants.csv"), *read(out / "constants.csv")]
    found = {r["constant"]: float(r["value"]) for r in table if r["task"] == name}
    shared = {**PAPER, "rho": found["rho"], "grad_bound": found["grad_bound"],
              "sigma_l": found["sigma_l"], "sigma_g": found["sigma_g"], "batch": 64}  # fmt: skip
    return {
        "theorem": deviation_coefficients(l=30, d=d, **shared),
        "sharper": sharper_coefficients(l=30, **shared),
        "equal": DeviationCoefficients(0.0, 0.0, 0.0, 0.0),
    }


if __name__ == "__main__":
    main()

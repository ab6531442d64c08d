"""Which mask is best: `python reproduce/theory/masks.py` (about 5 minutes), after reality.py.

FedAdam-SSM with the paper's settings, seed 0. For the updates of rounds 1, 4 and 8 and each client,
the weighted error of Theorem 1 under every mask over the certified minimum. The weights Γ, Λ, Θ are
those of the theorem at l = L with the constants of constants.csv, those of the sharper bound, and
1, 1, 1. Writes masks.csv. Needs Fashion-MNIST in FEDSIFT_DATA.
"""

import csv
from pathlib import Path
from statistics import mean

from tasks import TASKS

from fedsift.algorithms import fedadam_ssm
from fedsift.mask import kept
from fedsift.theory.deviation import DeviationCoefficients, deviation_coefficients
from fedsift.theory.masks import Sparsification, mask_costs
from fedsift.theory.reality import updates
from fedsift.theory.sharper import sharper_coefficients
from fedsift.vector import Moments

HERE = Path(__file__).parent
PAPER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6}
ROUNDS, DENSITIES = (1, 4, 8), (0.01, 0.05, 0.2)


def main() -> None:
    """Every task, round, density and set of weights."""
    with (HERE / "masks.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("task", "weights", "round", "density", "clients", "W", "M", "V", "union",
                         "best", "log_theta_over_gamma", "log_lambda_over_gamma"))  # fmt: skip
        for name in TASKS:
            for row in rows(name):
                writer.writerow(row)
                file.flush()


def rows(name: str):
    """One task's rows: means over the clients of cost over minimum."""
    task = TASKS[name]()
    weights = weights_of(name, task.layout.d)
    for number, delta in enumerate(updates(task, fedadam_ssm(**PAPER), max(ROUNDS)), 1):
        if number not in ROUNDS:
            continue
        for kind, w in weights.items():
            ratios = (w.log_theta - w.log_gamma, w.log_lambda - w.log_gamma)
            for density in DENSITIES:
                k = kept(density, task.layout.d)
                clients = [Moments(*one) for one in zip(*delta, strict=True)]
                costs = [mask_costs(Sparsification(one, w), k) for one in clients]
                means = (f"{mean(c[m] for c in costs):.5f}" for m in costs[0])
                yield (name, kind, number, density, len(clients), *means,
                       *(f"{r:.3f}" for r in ratios))  # fmt: skip


def weights_of(name: str, d: int) -> dict[str, DeviationCoefficients]:
    """Γ, Λ, Θ by three measures."""
    with (HERE / "constants.csv").open(encoding="utf-8") as file:
        found = {
            r["constant"]: float(r["value"]) for r in csv.DictReader(file) if r["task"] == name
        }
    shared = {**PAPER, "rho": found["rho"], "grad_bound": found["grad_bound"],
              "sigma_l": found["sigma_l"], "sigma_g": found["sigma_g"], "batch": 64}  # fmt: skip
    return {
        "theorem": deviation_coefficients(l=30, d=d, **shared),
        "sharper": sharper_coefficients(l=30, **shared),
        "equal": DeviationCoefficients(0.0, 0.0, 0.0, 0.0),
    }


if __name__ == "__main__":
    main()

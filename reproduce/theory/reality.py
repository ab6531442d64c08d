"""Compare deviation and bounds: `python reproduce/theory/reality.py` (about 10 minutes).

The paper's settings (L = 30, lr 0.001, density 0.05, seed 0). Writes reality.csv (one row per round
and step) and constants.csv. Needs Fashion-MNIST in FEDSIFT_DATA. Afterwards, `python
reproduce/theory/draw.py` draws reality.png.

The large networks, on a GPU and with CIFAR-10 there:
`--tasks vgg11-cifar10,resnet18-cifar10 --device cuda --out DIR`.
"""

import math
import time
from dataclasses import dataclass

from tables import replace_rows
from tasks import COMPARED, ORIGIN, arguments, moved_to, origin
from torch import Tensor

from fedsift.algorithms import fedadam_ssm
from fedsift.task import Task
from fedsift.theory.constants import estimate_constants
from fedsift.theory.deviation import deviation_recurrence, trivial_log_bound
from fedsift.theory.measured_deviation import (
    GradientNoise,
    compare_with_centralized,
    gradient_noise,
)
from fedsift.theory.objective import Objective
from fedsift.theory.sharper_bound import sharper_coefficients

ROUNDS = 4
PAPER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6}
LARGE = 1_000_000
"""With at least this many parameters, the constants use 32 samples per client instead of 128."""
COLUMNS = ("task", "round", "step", "x_w", "x_m", "x_v", "smallest", "largest",
           "log10_theorem", "log10_sharper", "log10_travel", *ORIGIN)  # fmt: skip
CONSTANTS = ("task", "constant", "value", "low", "high", "n", *ORIGIN)
LN10 = math.log(10)


@dataclass(frozen=True)
class RoundSummary:
    """The measurements of a round without its weights and gradients, which take gigabytes."""

    round: int
    errors: tuple[float, float, float]
    deviation: Tensor
    grad_bound: float
    noise: GradientNoise


def main() -> None:
    """Run all tasks and write the tables."""
    parsed = arguments(__doc__)
    for name in parsed.tasks:
        began = time.perf_counter()
        task = moved_to(parsed.device, COMPARED[name]())
        rows, constants = study(task)
        about = origin(task)
        replace_rows(parsed.out / "reality.csv", COLUMNS, [(name, *r, *about) for r in rows])
        replace_rows(
            parsed.out / "constants.csv", CONSTANTS, [(name, *c, *about) for c in constants]
        )
        print(f"{name}: {time.perf_counter() - began:.1f} s;", *rows[-1], flush=True)


def study(task: Task) -> tuple[list[tuple], list[tuple]]:
    """The rows and the constants of one task."""
    objective, d = Objective(task), task.layout.d
    summaries, points = [], []
    for comparison in compare_with_centralized(task, fedadam_ssm(**PAPER), ROUNDS):
        noise = gradient_noise(comparison, objective)
        deviation, bound = comparison.deviation.cpu(), comparison.grad_bound
        summaries.append(RoundSummary(comparison.round, comparison.errors, deviation, bound, noise))
        if comparison.round <= 2:
            points.append(comparison.central[0])
    points.append(comparison.central[-1])
    samples = 32 if d >= LARGE else 128
    constants = estimate_constants(task, points, samples=samples, iterations=15)
    measured = [(key, f"{e.value:.6g}", f"{e.low:.6g}", f"{e.high:.6g}", e.n)
                for key, e in vars(constants).items()]  # fmt: skip
    rows = [row for x in summaries for row in round_rows(x, d, constants.rho.value)]
    return rows, measured


def round_rows(summary: RoundSummary, d: int, rho: float) -> list[tuple]:
    """The deviation and its bounds after each step of a round."""
    noise = {"sigma_l": summary.noise.sampling, "sigma_g": summary.noise.between_clients}
    shared = {**PAPER, "rho": rho, "grad_bound": summary.grad_bound, "batch": 1, **noise}
    recurrence = deviation_recurrence(d=d, **shared)
    w, m, v = summary.errors
    errors = {"w_error": w, "m_error": m, "v_error": v}
    rows = []
    for step, real in enumerate(summary.deviation.T):
        theorem = recurrence.after(step).log_bound(**errors)
        sharper = sharper_coefficients(l=step, **shared).log_bound(**errors)
        travel = trivial_log_bound(l=step, d=d, eps=PAPER["eps"], lr=PAPER["lr"],
                                  grad_bound=shared["grad_bound"], w_error=w)  # fmt: skip
        logs = (f"{x / LN10:.4f}" for x in (theorem, sharper, travel))
        numbers = (f"{x:.6g}" for x in (w, m, v, float(real.min()), float(real.max())))
        rows.append((summary.round, step, *numbers, *logs))
    return rows


if __name__ == "__main__":
    main()

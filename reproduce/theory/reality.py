"""Real deviation against the bounds: `python reproduce/theory/reality.py` (about 10 minutes).

The paper's settings (L = 30, lr 0.001, density 0.05, seed 0). Writes reality.csv (a row a round and
step) and constants.csv. Needs Fashion-MNIST in FEDSIFT_DATA. `python reproduce/theory/draw.py` then
draws reality.png.

The large networks, on a GPU and with CIFAR-10 there:
`--tasks vgg11-cifar10,resnet18-cifar10 --device cuda --out DIR`.
"""

import math
import time
from dataclasses import dataclass

from tables import replace_rows
from tasks import MADE, WATCHED, arguments, made, on
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
"""From so many parameters on, the constants are measured on 32 samples a client, not 128."""
COLUMNS = ("task", "round", "step", "x_w", "x_m", "x_v", "smallest", "largest",
           "log10_theorem", "log10_sharper", "log10_travel", *MADE)  # fmt: skip
CONSTANTS = ("task", "constant", "value", "low", "high", "n", *MADE)
LN10 = math.log(10)


@dataclass(frozen=True)
class Seen:
    """What is kept of a round; its weights and gradients are gigabytes."""

    round: int
    errors: tuple[float, float, float]
    deviation: Tensor
    grad_bound: float
    noise: GradientNoise


def main() -> None:
    """Watch each task and write the tables."""
    given = arguments(__doc__)
    for name in given.tasks:
        began = time.perf_counter()
        task = on(given.device, WATCHED[name]())
        rows, constants = study(task)
        about = made(task)
        replace_rows(given.out / "reality.csv", COLUMNS, [(name, *r, *about) for r in rows])
        replace_rows(
            given.out / "constants.csv", CONSTANTS, [(name, *c, *about) for c in constants]
        )
        print(f"{name}: {time.perf_counter() - began:.1f} s;", *rows[-1], flush=True)


def study(task: Task) -> tuple[list[tuple], list[tuple]]:
    """One task's rows and constants."""
    objective, d = Objective(task), task.layout.d
    seen, points = [], []
    for each in compare_with_centralized(task, fedadam_ssm(**PAPER), ROUNDS):
        noise = gradient_noise(each, objective)
        seen.append(Seen(each.round, each.errors, each.deviation.cpu(), each.grad_bound, noise))
        if each.round <= 2:
            points.append(each.central[0])
    points.append(each.central[-1])
    samples = 32 if d >= LARGE else 128
    constants = estimate_constants(task, points, samples=samples, iterations=15)
    measured = [(key, f"{e.value:.6g}", f"{e.low:.6g}", f"{e.high:.6g}", e.n)
                for key, e in vars(constants).items()]  # fmt: skip
    return [row for each in seen for row in round_rows(each, d, constants.rho.value)], measured


def round_rows(each: Seen, d: int, rho: float) -> list[tuple]:
    """The deviation and its bounds after every step of a round."""
    shared = {**PAPER, "rho": rho, "grad_bound": each.grad_bound, "batch": 1,
              "sigma_l": each.noise.sampling, "sigma_g": each.noise.between_clients}  # fmt: skip
    recurrence = deviation_recurrence(d=d, **shared)
    w, m, v = each.errors
    errors = {"w_error": w, "m_error": m, "v_error": v}
    rows = []
    for step, real in enumerate(each.deviation.T):
        theorem = recurrence.after(step).log_bound(**errors)
        sharper = sharper_coefficients(l=step, **shared).log_bound(**errors)
        travel = trivial_log_bound(l=step, d=d, eps=PAPER["eps"], lr=PAPER["lr"],
                                  grad_bound=shared["grad_bound"], w_error=w)  # fmt: skip
        logs = (f"{x / LN10:.4f}" for x in (theorem, sharper, travel))
        numbers = (f"{x:.6g}" for x in (w, m, v, float(real.min()), float(real.max())))
        rows.append((each.round, step, *numbers, *logs))
    return rows


if __name__ == "__main__":
    main()

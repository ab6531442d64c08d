"""Real deviation against the bounds: `python reproduce/theory/reality.py` (about 10 minutes).

The paper's settings (L = 30, lr 0.001, density 0.05, seed 0). Writes reality.csv (a row a round and
step), constants.csv and reality.png. Needs Fashion-MNIST in FEDSIFT_DATA.
"""

import csv
import math
from pathlib import Path

import matplotlib
from tasks import TASKS

from fedsift.algorithms import fedadam_ssm
from fedsift.theory.constants import estimate_constants
from fedsift.theory.deviation import deviation_recurrence, travel_log_bound
from fedsift.theory.objective import Objective
from fedsift.theory.reality import visited_noise, watch
from fedsift.theory.sharper import sharper_coefficients

matplotlib.use("Agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
ROUNDS = 4
PAPER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6}
COLUMNS = ("task", "round", "step", "x_w", "x_m", "x_v", "smallest", "largest",
           "log10_theorem", "log10_sharper", "log10_travel")  # fmt: skip
LN10 = math.log(10)


def main() -> None:
    """Watch each task, write the tables and draw the figure."""
    rows, constants = [], []
    for name in TASKS:
        found, measured = study(name)
        rows += found
        constants += measured
        print(name, found[-1], flush=True)
    write("reality.csv", COLUMNS, rows)
    write("constants.csv", ("task", "constant", "value", "low", "high", "n"), constants)
    draw(rows)


def study(name: str) -> tuple[list[tuple], list[tuple]]:
    """One task's rows and constants."""
    task = TASKS[name]()
    objective = Objective(task)
    seen = list(watch(task, fedadam_ssm(**PAPER), ROUNDS))
    points = [seen[0].start.w, seen[1].central[0], seen[-1].central[-1]]
    constants = estimate_constants(task, points, samples=128, iterations=15)
    measured = [(name, key, f"{e.value:.6g}", f"{e.low:.6g}", f"{e.high:.6g}", e.n)
                for key, e in vars(constants).items()]  # fmt: skip
    rows = []
    for each in seen:
        noise = visited_noise(each, objective)
        shared = {**PAPER, "rho": constants.rho.value, "grad_bound": each.grad_bound,
                  "sigma_l": noise.sampling, "sigma_g": noise.between, "batch": 1}  # fmt: skip
        rows += [(name, *row) for row in round_rows(each, shared)]
    return rows, measured


def round_rows(each, shared) -> list[tuple]:
    """The deviation and its bounds after every step of a round."""
    d = each.start.w.numel()
    recurrence = deviation_recurrence(d=d, **shared)
    w, m, v = each.errors
    errors = {"w_error": w, "m_error": m, "v_error": v}
    rows = []
    for step, real in enumerate(each.deviation.T):
        theorem = recurrence.after(step).log_bound(**errors)
        sharper = sharper_coefficients(l=step, **shared).log_bound(**errors)
        travel = travel_log_bound(l=step, d=d, eps=PAPER["eps"], lr=PAPER["lr"],
                                  grad_bound=shared["grad_bound"], w_error=w)  # fmt: skip
        logs = (f"{x / LN10:.4f}" for x in (theorem, sharper, travel))
        numbers = (f"{x:.6g}" for x in (w, m, v, float(real.min()), float(real.max())))
        rows.append((each.round, step, *numbers, *logs))
    return rows


def write(name: str, header: tuple[str, ...], rows: list[tuple]) -> None:
    """A CSV beside this script."""
    with (HERE / name).open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def draw(rows: list[tuple]) -> None:
    """Decimal logarithms of the deviation and the bounds over the steps of the last round."""
    figure, axes = plt.subplots(1, len(TASKS), figsize=(4 * len(TASKS), 3.4), sharey=True)
    for name, axis in zip(TASKS, axes, strict=True):
        mine = [row for row in rows if row[0] == name and row[1] == ROUNDS and row[2] > 0]
        steps = [row[2] for row in mine]
        axis.plot(steps, [float(row[8]) for row in mine], label="Theorem 1, corrected")
        axis.plot(steps, [float(row[9]) for row in mine], label="moments followed one by one")
        axis.plot(steps, [float(row[10]) for row in mine], label="no theorem: distance travelled")
        axis.plot(steps, [math.log10(float(row[7])) for row in mine], "k", label="real, largest")
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("local step")
    axes[0].set_ylabel("log₁₀ of the deviation")
    axes[0].legend(fontsize=7, loc="upper left")
    figure.tight_layout()
    figure.savefig(HERE / "reality.png", dpi=110)


if __name__ == "__main__":
    main()

"""The commands ``fedsift bounds`` and ``fedsift advise``: parse, call, print."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from fedsift.advise.calibration import LineCallback, calibration_task
from fedsift.advise.calibration import advise as calibrate
from fedsift.advise.recommendation import Advice
from fedsift.cli.options import DataDir
from fedsift.cli.terminal import err, out, plain_table, user_input
from fedsift.data.folder import use_existing_data_folder
from fedsift.runs.config import RunConfig
from fedsift.theory.convergence import (
    Bound,
    Setting,
    local_steps_threshold,
    nonconvex_bound,
    pl_bound,
)
from fedsift.theory.deviation import deviation_coefficients, trivial_log_bound
from fedsift.theory.order import beta2_limit, coefficient_order
from fedsift.theory.sharper_bound import sharper_coefficients

Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def option(flag: str, text: str) -> Any:
    """One option of ``fedsift bounds``."""
    return typer.Option(flag, help=text)


def bounds(
    local_steps: Annotated[int, option("--local-steps", "L, local steps a round.")] = 30,
    d: Annotated[int, option("--d", "Number of model parameters.")] = 27_430,
    lr: Annotated[float, option("--lr", "Learning rate η.")] = 1e-3,
    density: Annotated[float, option("--density", "α = k/d, in (0, 1].")] = 0.05,
    beta1: Annotated[float, option("--beta1", "Decay of the first moment.")] = 0.9,
    beta2: Annotated[float, option("--beta2", "Decay of the second moment.")] = 0.999,
    eps: Annotated[float, option("--eps", "ε inside Adam's square root.")] = 1e-6,
    rho: Annotated[float, option("--rho", "ρ: gradients are ρ-Lipschitz.")] = 65.0,
    grad_bound: Annotated[
        float, option("--grad-bound", "G: no partial derivative is larger.")
    ] = 9.8,
    sigma_l: Annotated[float, option("--sigma-l", "σ_l: deviation of a sample's gradient.")] = 14.0,
    sigma_g: Annotated[float, option("--sigma-g", "σ_g: from local to global gradient.")] = 1.9,
    batch: Annotated[int, option("--batch", "A client's mini-batch.")] = 64,
    rounds: Annotated[int, option("--rounds", "T, communication rounds.")] = 30,
    gap: Annotated[float, option("--gap", "F(W⁰) less the least F.")] = 2.3,
    mu: Annotated[float, option("--mu", "μ of the PŁ condition.")] = 0.0072,
    as_json: Json = False,
) -> None:
    """Print the paper's bounds for given constants, and say which of them mean anything.

    The defaults are the paper's settings and constants like those that were measured on digits.

    Example: `fedsift bounds --d 21840 --rho 110 --grad-bound 25 --eps 0.01`
    """
    with user_input():
        setting = Setting(
            d, local_steps, lr, density, rho, grad_bound, sigma_l, sigma_g, (batch,), beta1, beta2,
            eps,
        )  # fmt: skip
        found = all_bounds(setting, rounds, gap, mu)
    if as_json:
        print(json.dumps(found, indent=2, allow_nan=False))
    else:
        for table in tables(found):
            out.print(table)


def all_bounds(setting: Setting, rounds: int, gap: float, mu: float) -> dict[str, Any]:
    """Every bound as plain values; the logarithm of zero is None."""
    s = setting
    shared: dict[str, Any] = {
        "l": s.local_steps, "beta1": s.beta1, "beta2": s.beta2, "eps": s.eps, "lr": s.lr,
        "rho": s.rho, "grad_bound": s.grad_bound,
    }  # fmt: skip
    noise: dict[str, Any] = {"sigma_l": s.sigma_l, "sigma_g": s.sigma_g, "batch": s.batches[0]}
    theorem = deviation_coefficients(d=s.d, **shared, **noise)
    sharper = sharper_coefficients(**shared, **noise)
    travel = trivial_log_bound(
        l=s.local_steps, d=s.d, eps=s.eps, lr=s.lr, grad_bound=s.grad_bound, w_error=0.0
    )
    where = coefficient_order(d=s.d, **shared)
    return {
        "theorem_1": {**logs(vars(theorem)), "vacuous": theorem.log_phi >= travel},
        "sharper": {**logs(vars(sharper)), "vacuous": sharper.log_phi >= travel},
        "travel": logs({"log_bound": travel}),
        "proposition_1": {
            **vars(where),
            "beta2_limit": beta2_limit(d=s.d, rho=s.rho, grad_bound=s.grad_bound),
        },
        "theorem_2": parts(nonconvex_bound(s, rounds=rounds, gap=gap)),
        "theorem_2_printed": parts(nonconvex_bound(s, rounds=rounds, gap=gap, printed=True)),
        "theorem_3": parts(pl_bound(s, rounds=rounds, gap=gap, mu=mu)),
        "theorem_3_printed": parts(pl_bound(s, rounds=rounds, gap=gap, mu=mu, printed=True)),
        "local_steps_threshold_printed": local_steps_threshold(
            d=s.d, density=s.density, eps=s.eps, rho=s.rho, grad_bound=s.grad_bound, gap=gap,
            rounds=rounds,
        ),
    }  # fmt: skip


def logs(values: dict[str, float]) -> dict[str, float | None]:
    """Logarithms that JSON can hold: -inf, the logarithm of zero, is None."""
    return {name: x if math.isfinite(x) else None for name, x in values.items()}


def parts(bound: Bound) -> dict[str, Any]:
    """A convergence bound's parts, its sum, and whether it says anything."""
    return {**vars(bound), "total": bound.total, "vacuous": bound.vacuous}


def tables(found: dict[str, Any]) -> Iterator[Table]:
    """The same for the eye."""
    yield deviation_table(found)
    yield order_table(found["proposition_1"])
    yield convergence_table(found)


def deviation_table(found: dict[str, Any]) -> Table:
    """Theorem 1, its sharper form, and what needs no theorem."""
    headings = ("Γ (of ΔW)", "Λ (of ΔM)", "Θ (of ΔV)", "Φ (the rest)", "vacuous")
    table = empty("Theorem 1: deviation from centralized Adam after L steps, log₁₀", headings)
    for name, row in (("Theorem 1", found["theorem_1"]), ("sharper", found["sharper"])):
        shown = [decimal(row[f"log_{c}"]) for c in ("gamma", "lambda", "theta", "phi")]
        table.add_row(name, *shown, yes(row["vacuous"]))
    table.add_row("no theorem", "", "", "", decimal(found["travel"]["log_bound"]), "")
    return table


def order_table(where: dict[str, Any]) -> Table:
    """Proposition 1: its condition, and the truth."""
    table = plain_table("Proposition 1: Γ > Θ > Λ", show_header=False)
    table.add_row("β₂ below the limit", f"{yes(where['condition'])} ({where['beta2_limit']:.6f})")
    table.add_row("Γ > Θ", yes(where["gamma_over_theta"]))
    table.add_row("Θ > Λ", yes(where["theta_over_lambda"]))
    return table


def convergence_table(found: dict[str, Any]) -> Table:
    """Theorems 2 and 3 by their parts."""
    names = ("theorem_2", "theorem_2_printed", "theorem_3", "theorem_3_printed")
    headings = (name.replace("theorem_", "Theorem ").replace("_", ", ") for name in names)
    table = empty("Theorems 2 and 3", tuple(headings))
    threshold = f"{found['local_steps_threshold_printed']:.4g}"
    table.caption = f"Threshold on L (Proposition 2, as printed): {threshold}; corrected: none."
    parts = {
        "initial": "rounds", "smoothness": "smoothness", "sparsification": "mask", "adam": "Adam",
        "noise": "noise", "total": "total", "trivial": "trivial bound",
    }  # fmt: skip
    for key, label in parts.items():
        table.add_row(label, *(f"{found[name][key]:.2e}" for name in names))
    table.add_row("vacuous", *(yes(found[name]["vacuous"]) for name in names))
    return table


def empty(title: str, headings: tuple[str, ...]) -> Table:
    """A table of numbers whose rows have names."""
    table = plain_table(title)
    table.add_column("")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def decimal(natural: float | None) -> str:
    """A natural logarithm as a decimal one.

    >>> decimal(math.log(1000)), decimal(None)
    ('3.00', '−∞')
    """
    return "−∞" if natural is None else f"{natural / math.log(10):.2f}"


def yes(x: bool) -> str:
    """A truth in a word.

    >>> yes(True), yes(False)
    ('yes', 'no')
    """
    return "yes" if x else "no"


def advise(
    dataset: Annotated[str, option("--dataset", "Data set.")] = "digits",
    model: Annotated[str, option("--model", "Model; auto picks one that fits the data.")] = "auto",
    budget_mbit: Annotated[
        float, option("--budget-mbit", "Uplink budget a client in Mibit, the paper's unit.")
    ] = 50.0,
    target: Annotated[
        float | None,
        typer.Option("--target", help="Accuracy to reach.", show_default="the defaults' own"),
    ] = None,
    clients: Annotated[int, option("--clients", "Number of clients.")] = 20,
    partition: Annotated[str, option("--partition", "iid, dirichlet or documents.")] = "iid",
    theta: Annotated[float, option("--theta", "Dirichlet concentration.")] = 0.1,
    batch_size: Annotated[int, option("--batch-size", "Samples a local step; 0: all.")] = 64,
    seed: Annotated[int, option("--seed", "Fixes weights, partition and mini-batches.")] = 0,
    calibration_rounds: Annotated[
        int, option("--calibration-rounds", "Rounds of the defaults that set the line.")
    ] = 5,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Recommend L, the learning rate and the density of FedAdam-SSM for a task.

    A short calibration on the training data, a few minutes; the test set is not looked at.

    Example: `fedsift advise --partition dirichlet --budget-mbit 10 --target 0.9`
    """
    values = {
        "dataset": dataset, "model": model, "clients": clients, "partition": partition,
        "theta": theta, "batch_size": batch_size, "seed": seed,
    }  # fmt: skip
    with user_input():
        use_existing_data_folder(data_dir)
        task = calibration_task(RunConfig.from_values(values))
        with watched() as watch:
            advice = calibrate(
                task, budget_mibit=budget_mbit, target=target, rounds=calibration_rounds,
                on_settings=lambda line: err.print(line, highlight=False, soft_wrap=True),
                on_round=watch,
            )  # fmt: skip
    command = command_line({**values, **({"data_dir": data_dir} if data_dir else {})}, advice)
    if as_json:
        print(json.dumps({**advice.json(), "command": command}, indent=2, allow_nan=False))
    else:
        show(advice, command)


@contextmanager
def watched() -> Iterator[LineCallback]:
    """What is being tried, and for how long, on a line that is gone when the work is done."""
    columns = SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=err, transient=True) as progress:
        now = progress.add_task("the first round", total=None)
        yield lambda line: progress.update(now, description=line)


def command_line(values: dict[str, Any], advice: Advice) -> str:
    """The run that follows the advice."""
    settings = {**values, **vars(advice.choice), "rounds": max(advice.rounds, 1)}
    if values["partition"] != "dirichlet":
        del settings["theta"]
    words = ((f"--{key.replace('_', '-')}", str(value)) for key, value in settings.items())
    return "fedsift run " + shlex.join(word for pair in words for word in pair)


def show(advice: Advice, command: str) -> None:
    """An advice for the eye."""
    table = plain_table("advice", show_header=False)
    choice = advice.choice
    table.add_row("local steps", str(choice.local_steps))
    table.add_row("learning rate", f"{choice.lr:g}")
    table.add_row("density", f"{choice.density:g}")
    table.add_row("rounds", f"{advice.rounds:,}")
    how = "measured" if advice.measured else "predicted"
    goal = f"{100 * advice.target:.1f} %"
    table.add_row(f"Mibit to {goal}", f"{mibit(advice.predicted)} ({how})")
    table.add_row(f"Mibit to {goal}, paper's defaults", mibit(advice.predicted_default))
    out.print(table)
    for heading, lines in (("why", advice.reasons), ("next", (command, *advice.next))):
        for line in lines:
            out.print(f"{heading}: {line}", soft_wrap=True, highlight=False)


def mibit(x: float | None) -> str:
    """Mibit to two decimals.

    >>> mibit(1.234), mibit(None)
    ('1.23', 'no forecast')
    """
    return "no forecast" if x is None else f"{x:.2f}"

"""The command ``fedsift bounds``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table

from fedsift.cli.exit_codes import user_input
from fedsift.cli.options import Json, option
from fedsift.cli.terminal import number_table, out, plain_table

if TYPE_CHECKING:
    from fedsift.theory.convergence import Bound, ConvergenceSetting


def bounds(
    local_steps: Annotated[int, option("--local-steps", "L, local steps per round.")] = 30,
    d: Annotated[int, option("--d", "Number of model parameters.")] = 27_430,
    lr: Annotated[float, option("--lr", "Learning rate η.")] = 1e-3,
    density: Annotated[float, option("--density", "α = k/d, in (0, 1].")] = 0.05,
    beta1: Annotated[float, option("--beta1", "Decay of the first moment.")] = 0.9,
    beta2: Annotated[float, option("--beta2", "Decay of the second moment.")] = 0.999,
    eps: Annotated[float, option("--eps", "ε inside Adam's square root.")] = 1e-6,
    rho: Annotated[float, option("--rho", "ρ: Lipschitz constant of the gradients.")] = 65.0,
    grad_bound: Annotated[
        float, option("--grad-bound", "G: bound on every partial derivative.")
    ] = 9.8,
    sigma_l: Annotated[
        float, option("--sigma-l", "σ_l: deviation of the gradient of one sample.")
    ] = 14.0,
    sigma_g: Annotated[
        float, option("--sigma-g", "σ_g: deviation of local from global gradients.")
    ] = 1.9,
    batch: Annotated[int, option("--batch", "Mini-batch size of a client.")] = 64,
    rounds: Annotated[int, option("--rounds", "T, communication rounds.")] = 30,
    gap: Annotated[float, option("--gap", "F(W⁰) minus the minimum of F.")] = 2.3,
    mu: Annotated[float, option("--mu", "μ in the Polyak–Łojasiewicz condition.")] = 0.0072,
    as_json: Json = False,
) -> None:
    """Evaluate the paper's bounds for given constants, and show which of them are vacuous.

    The defaults are the paper's settings, and constants close to those measured on digits.

    Example: `fedsift bounds --d 21840 --rho 110 --grad-bound 25 --eps 0.01`
    """
    from fedsift.theory.convergence import ConvergenceSetting

    with user_input():
        setting = ConvergenceSetting(
            d, local_steps, lr, density, rho, grad_bound, sigma_l, sigma_g, (batch,), beta1, beta2,
            eps,
        )  # fmt: skip
        found = all_bounds(setting, rounds, gap, mu)
    if as_json:
        print(json.dumps(found, indent=2, allow_nan=False))
    else:
        for table in tables(found):
            out.print(table)


def all_bounds(setting: ConvergenceSetting, rounds: int, gap: float, mu: float) -> dict[str, Any]:
    """Return every bound as plain values; the logarithm of zero is None."""
    from fedsift.theory.convergence import local_steps_threshold, nonconvex_bound, pl_bound
    from fedsift.theory.deviation import deviation_coefficients, trivial_log_bound
    from fedsift.theory.order import beta2_limit, coefficient_order
    from fedsift.theory.sharper_bound import sharper_coefficients

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
    order = coefficient_order(d=s.d, **shared)
    return {
        "theorem_1": {**finite_logs(vars(theorem)), "vacuous": theorem.log_phi >= travel},
        "sharper": {**finite_logs(vars(sharper)), "vacuous": sharper.log_phi >= travel},
        "travel": finite_logs({"log_bound": travel}),
        "proposition_1": {
            **vars(order),
            "beta2_limit": beta2_limit(d=s.d, rho=s.rho, grad_bound=s.grad_bound),
        },
        "theorem_2": bound_parts(nonconvex_bound(s, rounds=rounds, gap=gap)),
        "theorem_2_printed": bound_parts(nonconvex_bound(s, rounds=rounds, gap=gap, printed=True)),
        "theorem_3": bound_parts(pl_bound(s, rounds=rounds, gap=gap, mu=mu)),
        "theorem_3_printed": bound_parts(pl_bound(s, rounds=rounds, gap=gap, mu=mu, printed=True)),
        "local_steps_threshold_printed": local_steps_threshold(
            d=s.d, density=s.density, eps=s.eps, rho=s.rho, grad_bound=s.grad_bound, gap=gap,
            rounds=rounds,
        ),
    }  # fmt: skip


def finite_logs(values: dict[str, float]) -> dict[str, float | None]:
    """Return logarithms for JSON, with None for -inf."""
    return {name: x if math.isfinite(x) else None for name, x in values.items()}


def bound_parts(bound: Bound) -> dict[str, Any]:
    """Return the parts of a convergence bound, their sum, and whether the bound is vacuous."""
    return {**vars(bound), "total": bound.total, "vacuous": bound.vacuous}


def tables(found: dict[str, Any]) -> Iterator[Table]:
    """Yield the bounds as tables."""
    yield deviation_table(found)
    yield order_table(found["proposition_1"])
    yield convergence_table(found)


def deviation_table(found: dict[str, Any]) -> Table:
    """Return Theorem 1, its sharper form, and the trivial bound."""
    headings = ("Γ (of ΔW)", "Λ (of ΔM)", "Θ (of ΔV)", "Φ (the rest)", "vacuous")
    table = number_table(
        "Theorem 1: deviation from centralized Adam after L steps, log₁₀", headings
    )
    for name, row in (("Theorem 1", found["theorem_1"]), ("sharper", found["sharper"])):
        shown = [log10_text(row[f"log_{c}"]) for c in ("gamma", "lambda", "theta", "phi")]
        table.add_row(name, *shown, yes_no(row["vacuous"]))
    table.add_row("trivial bound", "", "", "", log10_text(found["travel"]["log_bound"]), "")
    return table


def order_table(order: dict[str, Any]) -> Table:
    """Return Proposition 1: its condition, and whether its conclusion holds."""
    table = plain_table("Proposition 1: Γ > Θ > Λ", show_header=False)
    table.add_row(
        "β₂ below the limit", f"{yes_no(order['condition'])} ({order['beta2_limit']:.6f})"
    )
    table.add_row("Γ > Θ", yes_no(order["gamma_over_theta"]))
    table.add_row("Θ > Λ", yes_no(order["theta_over_lambda"]))
    return table


def convergence_table(found: dict[str, Any]) -> Table:
    """Return Theorems 2 and 3, part by part."""
    names = ("theorem_2", "theorem_2_printed", "theorem_3", "theorem_3_printed")
    headings = (name.replace("theorem_", "Theorem ").replace("_", ", ") for name in names)
    table = number_table("Theorems 2 and 3", tuple(headings))
    threshold = f"{found['local_steps_threshold_printed']:.4g}"
    table.caption = f"Threshold on L (Proposition 2, as printed): {threshold}; corrected: none."
    parts = {
        "initial": "rounds", "smoothness": "smoothness", "sparsification": "mask", "adam": "Adam",
        "noise": "noise", "total": "total", "trivial": "trivial bound",
    }  # fmt: skip
    for key, label in parts.items():
        table.add_row(label, *(f"{found[name][key]:.2e}" for name in names))
    table.add_row("vacuous", *(yes_no(found[name]["vacuous"]) for name in names))
    return table


def log10_text(natural: float | None) -> str:
    """Return a natural logarithm as a decimal one.

    >>> log10_text(math.log(1000)), log10_text(None)
    ('3.00', '−∞')
    """
    return "−∞" if natural is None else f"{natural / math.log(10):.2f}"


def yes_no(x: bool) -> str:
    """Return yes or no.

    >>> yes_no(True), yes_no(False)
    ('yes', 'no')
    """
    return "yes" if x else "no"

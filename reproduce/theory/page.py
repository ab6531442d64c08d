"""Write the tables of docs/explanation/theory.md: `python reproduce/theory/page.py`."""

from collections.abc import Iterator
from statistics import mean

from tables import HERE, read

PAGE = HERE.parents[1] / "docs" / "explanation" / "theory.md"
NAMES = {
    "digits-iid": "digits, IID",
    "digits-dirichlet": "digits, Dirichlet 0.1",
    "fashion-mnist-cnn": "CNN, Fashion-MNIST",
    "vgg11-cifar10": "VGG-11, CIFAR-10",
    "resnet18-cifar10": "ResNet-18, CIFAR-10",
}
WEIGHTS = {"theorem": "Theorem 1", "sharper": "sharper", "equal": "1, 1, 1"}


def deviation() -> Iterator[tuple[str, ...]]:
    """The deviation at the end of the last round of each task."""
    rows = {row["task"]: row for row in read(HERE / "reality.csv")}
    yield (
        "task", "real, largest client", "Theorem 1, corrected", "moments one by one",
        "distance traveled",
    )  # fmt: skip
    for task, row in rows.items():
        bounds = (f"10^{float(row[f'log10_{x}']):.1f}" for x in ("theorem", "sharper", "travel"))
        yield NAMES[task], f"{float(row['largest']):.2f}", *bounds


def masks() -> Iterator[tuple[str, ...]]:
    """The costs of the masks at density 0.05, as means over the rounds."""
    cells: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in read(HERE / "masks.csv"):
        if row["density"] == "0.05":
            cells.setdefault((row["task"], row["weights"]), []).append(row)
    yield "task", "weights", "top-k of ΔW", "of ΔM", "of ΔV", "union"
    for (task, kind), rows in cells.items():
        means = (f"{mean(float(r[x]) for r in rows):.4f}" for x in ("W", "M", "V", "union"))
        yield NAMES[task], WEIGHTS[kind], *means


def constants() -> Iterator[tuple[str, ...]]:
    """The constants with their ranges; a maximum of observations is its own lower end."""
    found: dict[str, dict[str, str]] = {}
    for row in read(HERE / "constants.csv"):
        value, low, high = (
            f"{float(f'{float(row[key]):.2g}'):g}" for key in ("value", "low", "high")
        )
        ranges = {"grad_bound": f" (to {high})", "sigma_g": f" (to {high})", "mu": ""}
        shown = value + ranges.get(row["constant"], f" ({low} to {high})")
        found.setdefault(row["task"], {})[row["constant"]] = shown
    yield "task", "ρ", "G", "σ_l", "σ_g", "μ (at most)"
    for task, values in found.items():
        names = ("rho", "grad_bound", "sigma_l", "sigma_g", "mu")
        yield NAMES[task], *(values[name] for name in names)


def markdown(rows: Iterator[tuple[str, ...]]) -> str:
    """A Markdown table."""
    head, *body = rows
    lines = [head, ("---",) * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines).replace(" --- ", "---")


def filled(page: str) -> str:
    """The page with the tables inserted between their marks."""
    for table in (deviation, masks, constants):
        name = table.__name__
        first, last = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, _, rest = page.partition(first)
        _, _, after = rest.partition(last)
        page = f"{before}{first}\n\n{markdown(table())}\n\n{last}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text("utf-8")), encoding="utf-8")

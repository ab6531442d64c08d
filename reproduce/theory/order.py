"""Check Proposition 1 on a grid: `python reproduce/theory/order.py` (about 10 s, no randomness).

Writes order.csv (the counts of the printed condition and the order) and
order_counter_examples.csv (every distinct setting where the condition is met and Γ > Θ > Λ fails).
"""

import csv
from collections import Counter
from pathlib import Path

from fedsift.theory.order import survey

HERE = Path(__file__).parent
RELEVANT = ("d", "beta1", "beta2", "eps", "grad_bound")  # Θ > Λ depends only on these


def main() -> None:
    """Survey the grid and write both tables."""
    counts: Counter[tuple[bool, bool, bool]] = Counter()
    bad: dict[tuple[float, ...], int] = {}
    for setting, found in survey():
        counts[found.condition, found.gamma_over_theta, found.theta_over_lambda] += 1
        if found.is_counter_example:
            key = tuple(setting[name] for name in RELEVANT)
            bad[key] = bad.get(key, 0) + 1
    write("order.csv", ("condition", "gamma_over_theta", "theta_over_lambda", "settings"),
          [(*key, n) for key, n in sorted(counts.items())])  # fmt: skip
    write("order_counter_examples.csv", (*RELEVANT, "settings"),
          [(*key, n) for key, n in sorted(bad.items())])  # fmt: skip


def write(name: str, header: tuple[str, ...], rows: list[tuple[object, ...]]) -> None:
    """Write a CSV file next to this script."""
    with (HERE / name).open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


if __name__ == "__main__":
    main()

"""Test Theorem 1 on convex federations: `python reproduce/theory/inequality.py` (about 2 minutes).

Writes inequality.csv, one row per random trial (seeds 0 to 199), and sampling.csv: how often the
inequality fails after one step if σ_l is the standard deviation of Assumption 3.
"""

import csv
from pathlib import Path

from fedsift.theory.convex_trials import PROBLEMS, run_trial, sampling_ratios

HERE = Path(__file__).parent
SEEDS = range(200)


def main() -> None:
    """Run all trials and write both tables."""
    cases = [(kind, seed, batch) for kind in PROBLEMS for batch in (None, 2) for seed in SEEDS]
    trials = [run_trial(*case) for case in cases]
    with (HERE / "inequality.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("kind", "batch_size", "seed", "comparisons", "theorem", "sharper"))
        for t in trials:
            batch = t.batch_size or "all"
            row = (t.kind, batch, t.seed, t.steps, f"{t.theorem:.6g}", f"{t.sharper:.6g}")
            writer.writerow(row)
    ratios = [r for seed in range(50) for r in sampling_ratios(seed)]
    with (HERE / "sampling.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("comparisons", "above_the_bound", "mean_ratio", "largest_ratio"))
        above = sum(r > 1 for r in ratios)
        mean = sum(ratios) / len(ratios)
        writer.writerow((len(ratios), above, f"{mean:.4f}", f"{max(ratios):.4f}"))
    worst = max(t.theorem for t in trials)
    print(f"{sum(t.steps for t in trials)} comparisons, largest ratio {worst}")


if __name__ == "__main__":
    main()

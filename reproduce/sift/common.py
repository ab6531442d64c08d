"""Train sift_common on the CNN, and write the table of its traffic in docs/explanation/sift.md.

    python reproduce/sift/common.py                # train all runs, then write
    python reproduce/sift/common.py --no-run       # write from the runs as far as they are

The runs are those of ``fedsift reproduce sift --methods sift-common --device cpu``. ``secure_up``
are the bytes per client up to the target with ``--secure``: training has the same bits, so the
bytes of the protocol's messages are counted in two rounds and added.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from page import PAGE, amount, between, compared, markdown, percent

import fedsift
from fedsift import models
from fedsift.reproduce.experiments import Experiment
from fedsift.reproduce.plan import PlannedRun, Selection, plan
from fedsift.reproduce.runner import execute_run, is_finished
from fedsift.runs.compare import reached
from fedsift.runs.folder import RunFolder
from fedsift.runs.run import commit

TASK = "cnn-fashion-mnist"
TABLE = Path(__file__).with_name("common.csv")
NAMES = {"iid": "IID, 80.4 %", "noniid": "Dirichlet 0.1, 79.8 %"}
Row = dict[str, Any]


def main() -> None:
    """Train unless told not to, and write the table and the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--no-run", action="store_true")
    parser.add_argument("--commit", default=commit(), help="of the runs, with --no-run")
    parser.add_argument("--out", type=Path, default=Path("runs/reproduce"))
    arguments = parser.parse_args()
    selection = Selection(task=TASK, methods=("sift-common",), device="cpu")
    runs = plan(Experiment.load("sift"), selection)
    for run in [] if arguments.no_run else runs:
        if not is_finished(run, arguments.out):
            execute_run(run, arguments.out, lambda record: None)
    keys, per_round = secure_bytes()
    rows = [row_of(run, arguments, keys, per_round) for run in runs]
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    page = between(PAGE.read_text("utf-8"), "common", pieces(rows, keys, per_round))
    PAGE.write_text(page, encoding="utf-8")


def row_of(run: PlannedRun, arguments: argparse.Namespace, keys: float, per_round: float) -> Row:
    """Return the result of a run, as far as it is."""
    history = RunFolder(arguments.out / run.path).history()
    hit = reached(history, run.target)
    return {
        "setting": run.setting,
        "seed": run.config.seed,
        "rounds": history[-1]["round"],
        "round_to_target": hit and hit["round"],
        "up": hit and round(hit["uplink_bytes"]),
        "down": hit and round(hit["downlink_bytes"] - history[0]["downlink_bytes"]),
        "secure_up": hit and round(keys + hit["round"] * per_round + hit["uplink_bytes"]),
        "last_accuracy": history[-1]["accuracy"],
        "best_accuracy": max(record["accuracy"] for record in history),
        "device": "cpu",
        "commit": arguments.commit,
    }


def secure_bytes() -> tuple[float, float]:
    """Return what a secure sum adds per client: bytes up once per run, and per round.

    The values no longer travel in the frame. What a frame without values takes is counted, too.
    """
    clear, secure = (small_run(is_secure) for is_secure in (False, True))
    sent = [a["uplink_bytes"] - b["uplink_bytes"] for a, b in zip(secure, clear, strict=True)]
    first, second = sent[1], sent[2] - sent[1]
    return first - second, second


def small_run(is_secure: bool) -> list[Row]:
    """Return the history of two rounds of 20 clients with little data."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(400, 1, 28, 28, generator=draw), torch.arange(400) % 10
    return fedsift.simulate(
        models.build("cnn", (1, 28, 28), seed=0), [(x[n::20], y[n::20]) for n in range(20)],
        algorithm=fedsift.algorithms.sift_common(local_steps=1), rounds=2, batch_size=20,
        device="cpu", progress=False, secure=is_secure,
    ).history  # fmt: skip


def pieces(rows: Sequence[Row], keys: float, per_round: float) -> Iterator[str]:
    """Yield the table, and what it says about its runs."""
    yield (
        "Traffic to the target on the CNN, in kB per client without the initial model, means over "
        "the seeds that reached it. With `--secure` a client sends about "
        f"{per_round:.0f} bytes per round more, and {keys:.0f} once for its keys."
    )
    yield markdown(lines(rows))
    about = sorted({f"{row['setting']} {row['seed']}: {row['rounds']}" for row in rows})
    yield (
        f"`sift-common`: seeds 0, 1, 2, cpu, fp32, commit {rows[0]['commit']}. Rounds trained, by "
        f"setting and seed: {'; '.join(about)}. The other rows are those of "
        "[the comparison](#comparison-with-other-methods), after 150 rounds."
    )


def lines(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each setting and method."""
    yield (
        "split, target", "method", "reached", "rounds", "up", "down", "up, `--secure`",
        "FedAdam-SSM's up / up, `--secure`", "last accuracy",
    )  # fmt: skip
    for setting in NAMES:
        for name in ("fedadam-ssm", "sift"):
            yield from known(setting, name)
        group = [row for row in rows if row["setting"] == setting]
        hits = [row for row in group if row["round_to_target"]]
        ssm = 1e6 * result(setting, "fedadam-ssm")["target"]["up"]["mean"]
        secure = fmean(row["secure_up"] for row in hits) if hits else None
        yield (
            NAMES[setting], "`sift-common`", f"{len(hits)} of {len(group)}",
            f"{fmean(row['round_to_target'] for row in hits):.1f}" if hits else "–",
            amount(fmean(row["up"] for row in hits) if hits else None, "kB"),
            amount(fmean(row["down"] for row in hits) if hits else None, "kB"),
            amount(secure, "kB"), f"{ssm / secure:.1f}" if secure else "–",
            percent(fmean(row["last_accuracy"] for row in group)),
        )  # fmt: skip


def known(setting: str, name: str) -> Iterator[tuple[str, ...]]:
    """Yield the row of another method."""
    found = result(setting, name)
    target = found["target"]
    yield (
        NAMES[setting], f"`{name}`", "3 of 3", f"{target['round']['mean']:.1f}",
        amount(1e6 * target["up"]["mean"], "kB"), amount(1e6 * target["down"]["mean"], "kB"),
        "–", "–", percent(found["final_accuracy"]["mean"]),
    )  # fmt: skip


def result(setting: str, name: str) -> Row:
    """Return the committed result of another method."""
    found = (x for x in compared() if (x["task"], x["setting"]) == (TASK, setting))
    return next(x for x in found if x["method"] == name)


if __name__ == "__main__":
    main()

"""Is the advice worth taking? `python reproduce/theory/advise.py TASK` for each task.

Calibrates with seed 0 on four fifths of the training data, then trains with the advice and with the
paper's defaults on all of it, with seeds 1, 2 and 3, and counts the Mibit to the target on the test
set. Writes advise-TASK.json. Needs Fashion-MNIST in FEDSIFT_DATA; ten minutes or so each.

`python reproduce/theory/advise.py TASK MIBIT`, afterwards, trains both with seed 1 for so many
Mibit and writes advise-beyond-TASK.json.
"""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch
from tasks import task

from fedsift.advise.calibration import HELD_OUT, advise
from fedsift.advise.hyperparameters import Hyperparameters
from fedsift.algorithms import fedadam_ssm
from fedsift.engine import Reference, Task
from fedsift.federation.round import Federation
from fedsift.runs.compare import row_of
from fedsift.seeding import stream
from fedsift.simulation import run_rounds

HERE = Path(__file__).parent
SEEDS, MAX_ROUNDS, MAX_MIBIT = (1, 2, 3), 80, 8.0
TARGETS = {"digits-iid": 0.95, "digits-dirichlet": 0.85, "fashion-mnist-cnn": 0.75}


def make(name: str, seed: int) -> Task:
    """The task with a seed of its own; Fashion-MNIST is tested on 2,000 images."""
    if name == "fashion-mnist-cnn":
        whole = task("fashion-mnist", "iid", 10, batch_size=64, samples=4000, seed=seed)
        return replace(whole, test=(whole.test[0][:2000], whole.test[1][:2000]))
    return task("digits", name.removeprefix("digits-"), 20, batch_size=64, seed=seed)


def held_out(whole: Task) -> Task:
    """Keep a fifth of every client's samples to judge by, and forget the test set."""
    kept, judged = [], []
    for n, (x, y) in enumerate(whole.clients):
        order = stream(whole.seed, "held out", n).permutation(len(x))
        cut = len(x) // HELD_OUT
        judged.append((x[order[:cut]], y[order[:cut]]))
        kept.append((x[order[cut:]], y[order[cut:]]))
    xs, ys = zip(*judged, strict=True)
    return replace(whole, clients=kept, test=(torch.cat(xs), torch.cat(ys)))


def spent(name: str, seed: int, choice: Hyperparameters, target: float) -> dict[str, object]:
    """Train until the target, or until enough is enough."""
    mine = make(name, seed)
    federation = Federation(mine, fedadam_ssm(**asdict(choice)), Reference(mine))
    history = []
    for _, record in run_rounds(federation, federation.initial_snapshot(), MAX_ROUNDS):
        history.append(record)
        if record["accuracy"] >= target or record["uplink_bits_paper"] > MAX_MIBIT * 2**20:
            break
    row = row_of("fedadam-ssm", history, target)
    found = {
        "seed": seed, "mibit": row.mibit, "round": row.round, "megabytes": row.megabytes,
        "best_accuracy": row.best_accuracy, "local_steps": len(history) * choice.local_steps,
    }  # fmt: skip
    print(name, choice, found, flush=True)
    return found


def main(name: str) -> None:
    """Calibrate, validate, write."""
    target = TARGETS[name]
    advice = advise(held_out(make(name, 0)), target=target, on_settings=print)
    print(advice.json(), flush=True)
    kept = {k: v for k, v in advice.json().items() if k not in ("reasons", "next")}
    result = {"task": name, "target": target, "advice": kept}
    for label, choice in (("advised", advice.choice), ("defaults", Hyperparameters())):
        result[label] = [spent(name, seed, choice, target) for seed in SEEDS]
    (HERE / f"advise-{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def beyond(name: str, mibit: float) -> None:
    """Far past the target, with the same bits: does what was quick at first stay ahead? Seed 1."""
    advised = json.loads((HERE / f"advise-{name}.json").read_text("utf-8"))["advice"]["choice"]
    found = {}
    for label, choice in (("advised", Hyperparameters(**advised)), ("defaults", Hyperparameters())):
        mine = make(name, SEEDS[0])
        federation = Federation(mine, fedadam_ssm(**asdict(choice)), Reference(mine))
        rounds = round(mibit / choice.mibit(mine.layout.d))
        history = [
            record for _, record in run_rounds(federation, federation.initial_snapshot(), rounds)
        ]
        accuracies = [record["accuracy"] for record in history]
        found[label] = {
            "rounds": rounds, "mibit": history[-1]["uplink_bits_paper"] / 2**20,
            "best_accuracy": max(accuracies), "last_accuracy": accuracies[-1],
        }  # fmt: skip
        print(name, label, found[label], flush=True)
    path = HERE / f"advise-beyond-{name}.json"
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        beyond(sys.argv[1], float(sys.argv[2]))
    else:
        main(sys.argv[1])

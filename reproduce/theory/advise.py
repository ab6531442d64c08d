"""Compare the advice with the paper's defaults: `python reproduce/theory/advise.py TASK` per task.

Calibrates with seed 0 on four fifths of the training data, then trains with the advice and with the
paper's defaults on all of it, with seeds 1, 2 and 3, and counts the Mibit to the target on the test
set. Writes advise-TASK.json. Needs Fashion-MNIST in FEDSIFT_DATA; about ten minutes per task.

`python reproduce/theory/advise.py TASK MIBIT` then trains both with seed 1 for this many Mibit and
writes advise-beyond-TASK.json.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from tasks import task

from fedsift.advise.calibration import calibrate
from fedsift.advise.held_out import HELD_OUT
from fedsift.advise.hyperparameters import Hyperparameters
from fedsift.engine import Reference, Task
from fedsift.federation.round import Federation
from fedsift.runs.compare import row_of
from fedsift.seeding import stream
from fedsift.simulation import run_rounds

HERE = Path(__file__).parent
SEEDS, MAX_ROUNDS, MAX_MIBIT = (1, 2, 3), 80, 8.0
TARGETS = {"digits-iid": 0.95, "digits-dirichlet": 0.85, "fashion-mnist-cnn": 0.75}


def make(name: str, seed: int) -> Task:
    """The task with this seed; Fashion-MNIST is tested on 2,000 images."""
    if name == "fashion-mnist-cnn":
        whole = task("fashion-mnist", "iid", 10, batch_size=64, samples=4000, seed=seed)
        return replace(whole, test=(whole.test[0][:2000], whole.test[1][:2000]))
    return task("digits", name.removeprefix("digits-"), 20, batch_size=64, seed=seed)


def held_out(whole: Task) -> Task:
    """Replace the test set by a fifth of every client's samples, held out from training."""
    training, held = [], []
    for n, (x, y) in enumerate(whole.clients):
        order = stream(whole.seed, "held out", n).permutation(len(x))
        cut = len(x) // HELD_OUT
        held.append((x[order[:cut]], y[order[:cut]]))
        training.append((x[order[cut:]], y[order[cut:]]))
    xs, ys = zip(*held, strict=True)
    return replace(whole, clients=training, test=(torch.cat(xs), torch.cat(ys)))


def spent(name: str, seed: int, choice: Hyperparameters, target: float) -> dict[str, object]:
    """Train to the target, but not beyond the limits of rounds and Mibit."""
    local_task = make(name, seed)
    federation = Federation(local_task, choice.method, Reference(local_task))
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
    """Calibrate, validate and write the result."""
    target = TARGETS[name]
    advice = calibrate(held_out(make(name, 0)), target=target, on_settings=print)
    print(advice.json(), flush=True)
    fields = {k: v for k, v in advice.json().items() if k not in ("reasons", "next")}
    result = {"task": name, "target": target, "advice": fields}
    for label, choice in (("advised", advice.choice), ("defaults", Hyperparameters())):
        result[label] = [spent(name, seed, choice, target) for seed in SEEDS]
    (HERE / f"advise-{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def beyond(name: str, mibit: float) -> None:
    """Train far beyond the target, with seed 1 and equal bits, to see if the advice stays ahead."""
    advised = json.loads((HERE / f"advise-{name}.json").read_text("utf-8"))["advice"]["choice"]
    results = {}
    for label, choice in (("advised", Hyperparameters(**advised)), ("defaults", Hyperparameters())):
        local_task = make(name, SEEDS[0])
        federation = Federation(local_task, choice.method, Reference(local_task))
        rounds = round(mibit / choice.mibit(local_task.layout))
        history = [
            record for _, record in run_rounds(federation, federation.initial_snapshot(), rounds)
        ]
        accuracies = [record["accuracy"] for record in history]
        results[label] = {
            "rounds": rounds, "mibit": history[-1]["uplink_bits_paper"] / 2**20,
            "best_accuracy": max(accuracies), "last_accuracy": accuracies[-1],
        }  # fmt: skip
        print(name, label, results[label], flush=True)
    path = HERE / f"advise-beyond-{name}.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        beyond(sys.argv[1], float(sys.argv[2]))
    else:
        main(sys.argv[1])

"""What the GPU engine promises: the reference engine's result, the same bits again, room for many.

    python benchmarks/gpu.py --out benchmarks/results/gpu.json

How fast it is, `fedsift bench --device cuda --json` says. Here:

- ``float64``: five rounds of the CNN in float64, each client on its own stream, against the
  reference engine on the same GPU: the largest relative distance of W, M and V.
- ``smooth``: the same in float32 for a perceptron with tanh in place of ReLU and FedAdam, which has
  no mask: without kinks, rounding errors stay small.
- ``cnn``: the CNN with FedAdam-SSM in float32, after one step, one round and five. Beside it the
  reference engine against itself when W^0 is changed by 1e-7: what rounding alone does.
- ``resumed``: whether two rounds, a new engine, and two more end with the bits of four.
- ``thousand``: 1,000 clients of 30 steps of 64 samples in one cohort: seconds and gigabytes.
"""

import argparse
import copy
import json
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedsift.algorithms import fedadam, fedadam_ssm
from fedsift.engine import Reference, Stacked
from fedsift.models.networks import cnn
from fedsift.runs.config import RunConfig
from fedsift.runs.run import environment
from fedsift.simulation import Options, prepare


def federation(model, algorithm, clients=20, samples=256, device="cuda"):
    draw = torch.Generator().manual_seed(0)
    dtype = next(model.parameters()).dtype
    data = [
        (torch.randn(samples, 1, 28, 28, generator=draw).to(dtype), torch.arange(samples) % 10)
        for _ in range(clients)
    ]
    return prepare(
        model, data, None, algorithm, Options(batch_size=64, participation=1.0, dropout=0.0,
        min_clients=0, wire="count", loss=cross_entropy, seed=0, device=device),
    )  # fmt: skip


def made(make, dtype=torch.float32):
    torch.manual_seed(0)
    return make().to(dtype)


def tanh_net():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.Tanh(), nn.Linear(32, 10))


def states(fed, rounds):
    snapshot = fed.initial_snapshot()
    for _ in range(rounds):
        snapshot, _ = fed.run_round(snapshot)
    return snapshot.state


def distance(ours, theirs) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))


def from_reference(fed, rounds) -> float:
    serial = replace(fed, engine=Reference(fed.task))
    return distance(states(fed, rounds), states(serial, rounds))


def from_itself(fed, rounds) -> float:
    """The reference engine against itself, begun 1e-7 beside."""
    beside = copy.deepcopy(fed.task.model)
    w = fed.task.layout.read(beside)
    noise = torch.randn(w.shape, generator=torch.Generator().manual_seed(1)).to(w)
    fed.task.layout.write(w + 1e-7 * w.norm() / noise.norm() * noise, beside)
    serial = replace(fed, engine=Reference(fed.task))
    other = replace(fed, task=replace(fed.task, model=beside), engine=Reference(fed.task))
    return distance(states(other, rounds), states(serial, rounds))


def resumed() -> bool:
    fed = federation(made(cnn), fedadam_ssm())
    unbroken = states(fed, 4)
    half, _ = fed.run_round(fed.run_round(fed.initial_snapshot())[0])
    again = replace(fed, engine=Stacked(fed.task, fed.algorithm))
    end, _ = again.run_round(again.run_round(half)[0])
    return all(torch.equal(a, b) for a, b in zip(unbroken, end.state, strict=True))


def thousand() -> dict[str, float]:
    fed = federation(made(cnn), fedadam_ssm(), clients=1000, samples=60)
    torch.cuda.reset_peak_memory_stats()
    snapshot, _ = fed.run_round(fed.initial_snapshot())
    torch.cuda.synchronize()
    began = time.perf_counter()
    fed.run_round(snapshot)
    torch.cuda.synchronize()
    return {
        "seconds": time.perf_counter() - began,
        "gigabytes": torch.cuda.max_memory_allocated() / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False  # the reference engine leaves such choices to torch
    one_step = federation(made(cnn), fedadam_ssm(local_steps=1))
    full = federation(made(cnn), fedadam_ssm())
    found = {
        "environment": environment(RunConfig(device="cuda")),
        "float64": from_reference(federation(made(cnn, torch.float64), fedadam_ssm()), 5),
        "smooth": from_reference(federation(made(tanh_net), fedadam()), 5),
        "cnn": {
            "one step": from_reference(one_step, 1),
            "one round": from_reference(full, 1),
            "five rounds": from_reference(full, 5),
            "one round, reference begun 1e-7 beside": from_itself(full, 1),
            "five rounds, reference begun 1e-7 beside": from_itself(full, 5),
        },
        "resumed": resumed(),
        "thousand": thousand(),
    }
    print(json.dumps(found, indent=1))
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Checks of the GPU engine: agreement with the reference, reproducible bits, many clients.

    python benchmarks/gpu.py --out benchmarks/results/gpu.json

`fedsift bench --device cuda --json` measures its speed. This script reports:

- ``float64``: the largest relative distance of W, M and V from the reference engine on the same
  GPU, after five rounds of the CNN in float64.
- ``smooth``: the same in float32 for a perceptron with tanh instead of ReLU and for FedAdam, which
  has no mask. Without discontinuities, rounding errors stay small.
- ``cnn``: the same for the CNN with FedAdam-SSM in float32, after one step, one round and five
  rounds; for comparison, the effect of changing W^0 by 1e-7 in the reference engine.
- ``resumed``: whether two rounds, a new engine and two more rounds give the bits of four rounds.
- ``thousand``: seconds and gigabytes of a round of 1,000 clients, 30 steps of 64 samples each.
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
from fedsift.models.convnets import cnn
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


def build(make, dtype=torch.float32):
    torch.manual_seed(0)
    return make().to(dtype)


def tanh_net():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.Tanh(), nn.Linear(32, 10))


def state_after(fed, rounds):
    snapshot = fed.initial_snapshot()
    for _ in range(rounds):
        snapshot, _ = fed.run_round(snapshot)
    return snapshot.state


def distance(ours, theirs) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))


def distance_from_reference(fed, rounds) -> float:
    serial = replace(fed, engine=Reference(fed.task))
    return distance(state_after(fed, rounds), state_after(serial, rounds))


def distance_from_perturbed(fed, rounds) -> float:
    """The distance in the reference engine between W^0 and W^0 changed by 1e-7."""
    perturbed = copy.deepcopy(fed.task.model)
    w = fed.task.layout.read(perturbed)
    noise = torch.randn(w.shape, generator=torch.Generator().manual_seed(1)).to(w)
    fed.task.layout.write(w + 1e-7 * w.norm() / noise.norm() * noise, perturbed)
    serial = replace(fed, engine=Reference(fed.task))
    other = replace(fed, task=replace(fed.task, model=perturbed), engine=Reference(fed.task))
    return distance(state_after(other, rounds), state_after(serial, rounds))


def resumed() -> bool:
    fed = federation(build(cnn), fedadam_ssm())
    uninterrupted = state_after(fed, 4)
    half, _ = fed.run_round(fed.run_round(fed.initial_snapshot())[0])
    again = replace(fed, engine=Stacked(fed.task, fed.algorithm))
    end, _ = again.run_round(again.run_round(half)[0])
    return all(torch.equal(a, b) for a, b in zip(uninterrupted, end.state, strict=True))


def thousand() -> dict[str, float]:
    fed = federation(build(cnn), fedadam_ssm(), clients=1000, samples=60)
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
    arguments = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False  # the reference engine uses torch's setting
    one_step = federation(build(cnn), fedadam_ssm(local_steps=1))
    full = federation(build(cnn), fedadam_ssm())
    results = {
        "environment": environment(RunConfig(device="cuda")),
        "float64": distance_from_reference(federation(build(cnn, torch.float64), fedadam_ssm()), 5),
        "smooth": distance_from_reference(federation(build(tanh_net), fedadam()), 5),
        "cnn": {
            "one step": distance_from_reference(one_step, 1),
            "one round": distance_from_reference(full, 1),
            "five rounds": distance_from_reference(full, 5),
            "one round, reference perturbed by 1e-7": distance_from_perturbed(full, 1),
            "five rounds, reference perturbed by 1e-7": distance_from_perturbed(full, 5),
        },
        "resumed": resumed(),
        "thousand": thousand(),
    }
    print(json.dumps(results, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

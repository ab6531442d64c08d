"""Seconds a round on a GPU, and how far its result is from the reference engine's.

    python benchmarks/gpu.py cnn:fashion-mnist:fp32 vgg11:cifar-10:bf16 --out gpu.json

A round is 20 clients of 30 steps of 64 samples with FedAdam-SSM at 5 %. ``train`` is its
local training alone, ``round`` everything: training, selection, accounting, merging.
"""

import argparse
import copy
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from fedsift.engine import Reference, Stacked
from fedsift.runs.config import RunConfig
from fedsift.runs.run import environment, federation_of
from fedsift.vector import Layout


def seconds(work, repeat: int = 7) -> float:
    times = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return median(times)


def measure(name: str, check: bool) -> dict[str, object]:
    model, dataset, precision = name.split(":")
    config = RunConfig.from_values(
        {"model": model, "dataset": dataset, "precision": precision, "device": "cuda"}
    )
    fed = federation_of(config)
    began = time.perf_counter()
    first, _ = fed.play(fed.first())
    torch.cuda.synchronize()
    row: dict[str, object] = {"case": name, "first_round": time.perf_counter() - began}
    row["round"] = seconds(lambda: fed.play(first))
    row["train"] = seconds(lambda: train_only(fed, first))
    row["evaluate"] = seconds(lambda: fed.engine.evaluate(first.state.w))
    row["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    if check:
        row["relative_error_after_5_rounds"] = deviation(fed)
    return row


def train_only(fed, snapshot) -> None:
    from fedsift.engine.stacked import stack_memory, stack_state
    from fedsift.engine.task import Job

    phase = fed.algorithm.phase(2)
    cohort = fed.cohort(2)
    job = Job(2, phase, snapshot.state, cohort, fed.memories(snapshot, cohort))
    for stack in fed.engine.stacks(cohort):
        memory = stack_memory([job.memory[n] for n in stack])
        start = phase.begin(stack_state(job.state, len(stack)), memory)
        fed.engine._local_steps(job, stack, start)


def deviation(fed) -> float:
    """The largest of the relative distances of W, M and V from the reference engine's, in float64.

    In float32 it would say nothing, as sensitivity.py shows: rounding errors grow a
    thousandfold and more in a round. In float64 they start at 1e-16.
    """
    model = copy.deepcopy(fed.task.model).double()
    clients = [(x.double(), y) for x, y in fed.task.clients]
    task = replace(fed.task, model=model, clients=clients, test=None, layout=Layout.of(model))
    stacked = replace(fed, task=task, engine=Stacked(task, fed.algorithm))
    serial = replace(fed, task=task, engine=Reference(task))
    ours, theirs = stacked.first(), serial.first()
    for _ in range(5):
        ours, _ = stacked.play(ours)
        theirs, _ = serial.play(theirs)
    pairs = zip(ours.state, theirs.state, strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="+", help="MODEL:DATASET:PRECISION")
    parser.add_argument("--check", action="store_true", help="compare with the reference engine")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    for case in given.cases:
        try:
            row = measure(case, given.check)
        except Exception as problem:
            row = {"case": case, "error": repr(problem)[:2000]}
        rows.append(row)
        print(row, flush=True)
        torch.cuda.empty_cache()
    if given.out:
        about = {"environment": environment(RunConfig()), "rows": rows}
        given.out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Seconds per round against the number of clients and of parameters.

    python benchmarks/growth.py measure --out benchmarks/results/growth-cpu.json
    python benchmarks/growth.py plot benchmarks/results/growth-*.json --out docs/images/growth.png

``measure`` does not need matplotlib. Clients: the paper's CNN and a single cohort of 10 to 1,000
clients. Parameters: a two-layer perceptron with 10^4 to 10^7 parameters and 10 clients. All rounds
are FedAdam-SSM at 5 % on random images of 28 x 28. On a CPU, fewer steps, smaller batches and
smaller sizes keep the time to minutes; the output file records them.
"""

import argparse
import json
import math
import time
from pathlib import Path
from statistics import median, quantiles

import torch
from torch import nn

from fedsift.algorithms import fedadam_ssm
from fedsift.models.convnets import cnn
from fedsift.runs.config import RunConfig
from fedsift.runs.run import environment
from fedsift.simulation import Options, prepare

CLIENTS = (10, 30, 100, 300, 1000)
PARAMETERS = (10**4, 10**5, 10**6, 10**7)
CPU_LOAD = {"steps": 3, "batch": 16}
GPU_LOAD = {"steps": 30, "batch": 64}


def perceptron(d: int) -> nn.Module:
    """Two layers with about d parameters: 795 h + 10 for h hidden units."""
    hidden = max(1, round((d - 10) / 795))
    return nn.Sequential(nn.Flatten(), nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def time_rounds(model: nn.Module, clients: int, load: dict, device: str, rounds: int) -> dict:
    draw = torch.Generator().manual_seed(0)
    size = 2 * load["batch"]
    data = [
        (torch.randn(size, 1, 28, 28, generator=draw), torch.arange(size) % 10)
        for _ in range(clients)
    ]
    federation = prepare(
        model, data, None, fedadam_ssm(local_steps=load["steps"]), Options(batch_size=load["batch"],
        participation=1.0, dropout=0.0, min_clients=0, wire="count",
        loss=nn.functional.cross_entropy, seed=0, device=device),
    )  # fmt: skip
    if device == "cpu":
        federation.engine.start_pool()  # otherwise small rounds would run in one process
    snapshot, _ = federation.run_round(federation.initial_snapshot())
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        snapshot, _ = federation.run_round(snapshot)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    row = {"clients": clients, "parameters": federation.task.layout.d}
    quartiles = quantiles(seconds)[::2] if rounds > 1 else seconds * 2
    return {**row, "seconds": median(seconds), "quartiles": quartiles}


def slope(points: list[tuple[float, float]]) -> float:
    """The least-squares slope of the points in log-log coordinates."""
    logs = [(math.log(x), math.log(y)) for x, y in points]
    mean_x, mean_y = (sum(axis) / len(logs) for axis in zip(*logs, strict=True))
    variance = sum((x - mean_x) ** 2 for x, _ in logs)
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / variance


def measure(out: Path, device: str, rounds: int, most_clients: int, most_parameters: int) -> None:
    load = GPU_LOAD if device == "cuda" else CPU_LOAD
    results: dict[str, object] = {
        "environment": environment(RunConfig(device=device)), "device": device,
        "rounds": rounds, "load": load, "clients": [], "parameters": [],
    }  # fmt: skip
    for clients in (n for n in CLIENTS if n <= most_clients):
        torch.manual_seed(0)
        results["clients"].append(time_rounds(cnn(), clients, load, device, rounds))
        print(results["clients"][-1], flush=True)
    for d in (n for n in PARAMETERS if n <= most_parameters):
        torch.manual_seed(0)
        results["parameters"].append(time_rounds(perceptron(d), 10, load, device, rounds))
        print(results["parameters"][-1], flush=True)
    for axis in ("clients", "parameters"):
        points = [(row[axis], row["seconds"]) for row in results[axis]]
        results[f"slope_{axis}"] = slope(points)
        results[f"last_slope_{axis}"] = slope(points[-2:])
        print(f"slope against {axis}: {results[f'slope_{axis}']:.2f}")
    out.write_text(json.dumps(results, indent=1) + "\n")


def plot(files: list[Path], out: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for file in files:
        results = json.loads(file.read_text())
        load = results["load"]
        name_of_device = results["environment"]["device"]
        for axis, name in zip(axes, ("clients", "parameters"), strict=True):
            rows = results[name]
            label = f"{name_of_device}, {load['steps']} steps of {load['batch']}\n"
            label += (
                f"slope {results[f'slope_{name}']:.2f}, last {results[f'last_slope_{name}']:.2f}"
            )
            x, y = [r[name] for r in rows], [r["seconds"] for r in rows]
            low = [r["seconds"] - r["quartiles"][0] for r in rows]
            high = [r["quartiles"][1] - r["seconds"] for r in rows]
            spread = [[max(0, v) for v in low], [max(0, v) for v in high]]
            axis.errorbar(x, y, spread, marker="o", capsize=3, label=label)
    for axis, name in zip(axes, ("clients per round (CNN)", "parameters d"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel=name, ylabel="seconds per round")
        axis.grid(True, alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(out, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    measuring.add_argument("--rounds", type=int, default=5)
    measuring.add_argument("--most-clients", type=int, default=1000)
    measuring.add_argument("--most-parameters", type=int, default=10**7)
    measuring.add_argument("--out", type=Path, required=True)
    plotting = commands.add_parser("plot")
    plotting.add_argument("files", type=Path, nargs="+")
    plotting.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.command == "plot":
        plot(arguments.files, arguments.out)
    else:
        most = (arguments.most_clients, arguments.most_parameters)
        measure(arguments.out, arguments.device, arguments.rounds, *most)


if __name__ == "__main__":
    main()

"""Time to a target accuracy behind links of 1 Mbit/s: FedAvg, FedAdam and FedAdam-SSM.

sudo python benchmarks/flower/slow_link.py

The clients run in network namespaces of their own, joined to the server by veth pairs that tbf
limits each way. That needs Linux, root, and ip and tc (Debian: iproute2). Elsewhere the links are
proxies on loopback; the results say which. Namespaces and links are removed at the end. Needs
fedsift[flower] and matplotlib, some ten minutes, and a machine that does nothing else.

Each method has the best learning rate of three, found by simulation. FedAvg is Flower's own
strategy with local SGD.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from measure import HERE, measure, write
from race.task import BATCH, load_share, make_model

import fedsift
from fedsift import data
from fedsift.algorithms import METHODS

CLIENTS, RATE, TARGET, STEPS, DENSITY = 3, 1e6, 0.97, 30, 0.05
GRID = {
    "fedsgd": (0.03, 0.1, 0.3),
    "fedadam": (3e-4, 1e-3, 3e-3),
    "fedadam-ssm": (3e-4, 1e-3, 3e-3),
}
RUNS = {"fedavg": ("fedsgd", 5), "fedadam": ("fedadam", 3), "fedadam-ssm": ("fedadam-ssm", 6)}
NAMES = {"fedavg": "FedAvg (Flower's own)", "fedadam": "FedAdam", "fedadam-ssm": "FedAdam-SSM, 5 %"}


def tuned(name: str) -> float:
    """The learning rate whose mean accuracy over eight simulated rounds is best."""

    def score(lr: float) -> float:
        density = {"density": DENSITY} if name == "fedadam-ssm" else {}
        result = fedsift.simulate(
            make_model("mlp"), [load_share("mlp", n, CLIENTS) for n in range(CLIENTS)],
            test=data.load("digits").test, rounds=8, batch_size=BATCH,
            algorithm=METHODS[name](local_steps=STEPS, lr=lr, **density),
        )  # fmt: skip
        return sum(record["accuracy"] for record in result.history)

    return max(GRID[name], key=score)


def race(method: str) -> dict[str, object]:
    """One method's run behind slow links."""
    twin, rounds = RUNS[method]
    lr = tuned(twin)
    settings = {"lr": lr, "rounds": rounds, "local-steps": STEPS, "density": DENSITY}
    busy = [os.getloadavg()[0]]
    run = measure(CLIENTS, RATE, method=method, **settings)
    busy.append(os.getloadavg()[0])
    points = [n for n in run.notes if n["round"] > 0]
    reached = next((n["seconds"] for n in points if n["accuracy"] >= TARGET), None)
    print(f"{method}: lr {lr}, {TARGET:.0%} after {reached} s", flush=True)
    return {
        "lr": lr, "seconds_to_target": reached, "points": points, "load_average": busy,
        "links": run.links, "measured_bits_a_second": run.checks,
        "uplink_bytes_a_client": (sum(run.up) - sum(run.idle_up)) / CLIENTS,
        "downlink_bytes_a_client": (sum(run.down) - sum(run.idle_down)) / CLIENTS,
    }  # fmt: skip


def draw(results: dict[str, dict[str, object]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for method, result in results.items():
        x = [point["seconds"] for point in result["points"]]
        y = [100 * point["accuracy"] for point in result["points"]]
        axes.plot(x, y, marker="o", label=NAMES[method])
    axes.axhline(100 * TARGET, color="gray", linewidth=0.8, linestyle="--")
    axes.set(xlabel="seconds since the start", ylabel="test accuracy, %", xlim=(0, None))
    axes.set_title(f"{CLIENTS} clients behind links of 1 Mbit/s, 301,066 parameters")
    axes.legend()
    figure.savefig(path, dpi=150)
    print(path)


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=form).parse_args()
    torch.set_num_threads(1)
    results = {method: race(method) for method in RUNS}
    about = {"clients": CLIENTS, "bits_a_second": RATE, "target": TARGET, "local_steps": STEPS}
    write("slow_link.json", {**about, "density": DENSITY, "seed": 0, "methods": results})
    draw(results, HERE / "results" / "slow_link.png")


if __name__ == "__main__":
    main()

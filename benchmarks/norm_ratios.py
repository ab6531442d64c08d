"""Measure how much the norms of honest updates differ, to choose the default of max_norm_ratio.

    python benchmarks/norm_ratios.py --dataset digits --rounds 40 --out norms.json

Trains with every method on IID and Dirichlet data, without attackers and without the bound. Prints
by role the largest ratio of an update's norm to the usual norm, and its round.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from fedsift.algorithms import METHODS, settings_of
from fedsift.codec.update import ROLES
from fedsift.federation.norm_bound import NormHistory, Norms, norms_of
from fedsift.runs.config import RunConfig
from fedsift.runs.run import federation_of
from fedsift.simulation import initial_snapshot, run_rounds


def norms_of_run(config: RunConfig) -> list[list[Norms]]:
    """The norms of each round's uploads."""
    rounds: list[list[Norms]] = [[] for _ in range(config.rounds)]

    def note(specs, update, sizes):
        rounds[specs[0].round - 1] += norms_of(update)

    federation = replace(federation_of(config), on_upload=note)
    for _ in run_rounds(federation, initial_snapshot(federation), config.rounds):
        pass
    return rounds


def largest_ratios(rounds: list[list[Norms]]) -> dict[str, tuple[float, int]]:
    """By role, the largest ratio to the usual norm, and its round."""
    found: dict[str, tuple[float, int]] = {}
    history = NormHistory()
    for number, norms in enumerate(rounds, start=1):
        for role in ROLES:
            if usual := history.typical(role, norms):
                ratio = max(each.get(role, 0.0) for each in norms) / usual
                found[role] = max(found.get(role, (0.0, 0)), (ratio, number))
        history = history.after(norms)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--participation", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--thetas", default="iid,0.1,0.01")
    parser.add_argument("--local-steps", type=int)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    everything = {}
    for name in asked.methods.split(","):
        for theta in asked.thetas.split(","):
            values = {
                "algorithm": name, "dataset": asked.dataset, "rounds": asked.rounds,
                "clients": asked.clients, "participation": asked.participation,
                "seed": asked.seed, "max_norm_ratio": 0,
            }  # fmt: skip
            if theta != "iid":
                values |= {"partition": "dirichlet", "theta": float(theta)}
            if asked.local_steps and "local_steps" in settings_of(name):
                values["local_steps"] = asked.local_steps
            norms = norms_of_run(RunConfig.from_values(values))
            everything[f"{name} {theta}"] = norms
            ratios = "  ".join(
                f"{role}: {ratio:8.2f} (round {number})"
                for role, (ratio, number) in largest_ratios(norms).items()
            )
            print(f"{name:16} {theta:5} {ratios}", flush=True)
    if asked.out:
        asked.out.write_text(json.dumps(everything))


if __name__ == "__main__":
    main()

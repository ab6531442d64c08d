"""Two hostile clients of twenty: the accuracy that remains, by attack, method and defense.

``python benchmarks/hostile_clients.py`` trains, writes ``results/hostile_clients.json`` and prints
the table of docs/how-to/hostile-clients.md; with ``--table``, only the latter.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedsift import algorithms, data
from fedsift.algorithms import Algorithm
from fedsift.codec.update import CodedValues, Update
from fedsift.engine import Reference
from fedsift.engine.contract import ClientResult, Engine, Job
from fedsift.errors import Diverged
from fedsift.federation.round import Federation
from fedsift.simulation import Options, initial_snapshot, prepare, run_rounds

RESULTS = Path(__file__).parent / "results" / "hostile_clients.json"
CLIENTS, HOSTILE, ROUNDS, SEED = 20, (3, 11), 15, 0
METHODS = {
    "fedadam-ssm": algorithms.fedadam_ssm(density=0.2, local_steps=5, lr=0.01),
    "sift": algorithms.sift(density=0.1, local_steps=5, lr=0.01),
    "fedadam": algorithms.fedadam(local_steps=5, lr=0.01),
    "fedavg": algorithms.fedavg(local_steps=5, lr=0.3),
}
Tamper = Callable[[str, Tensor], Tensor]
ATTACKS: Mapping[str, Tamper | None] = {
    "nobody": None,
    "sign flipped × 100": lambda role, x: -100 * x,
    "sign flipped × 10": lambda role, x: -10 * x,
    "V = 1e11": lambda role, x: torch.full_like(x, 1e11) if role == "v" else x,
}
DEFENSES: Mapping[str, dict[str, Any]] = {
    "none": {"max_norm_ratio": 0},
    "norm bound": {},
    "median": {"max_norm_ratio": 0, "aggregation": "median"},
    "trimmed": {"max_norm_ratio": 0, "aggregation": "trimmed"},
}
SPARSE = {"fedadam-ssm", "sift"}
WITHOUT_V = {"fedavg"}


@dataclass(frozen=True)
class Attacked:
    """An engine two of whose clients tamper with their update."""

    engine: Engine
    tamper: Tamper

    def train(self, job: Job) -> Iterator[ClientResult]:
        """Yield the results, those of the hostile clients changed."""
        for result in self.engine.train(job):
            assert isinstance(result, ClientResult)
            is_hostile = result.client in HOSTILE
            yield replace(result, update=self.changed(result.update)) if is_hostile else result

    def changed(self, update: Update) -> Update:
        """Return an update with other values."""
        parts = tuple(
            replace(part, values={role: CodedValues.of(self.tamper(role, x.restore()), x.coder)
                                  for role, x in part.values.items()})
            for part in update.parts
        )  # fmt: skip
        return Update(parts, update.weights)

    def evaluate(self, w: Tensor) -> tuple[float | None, float | None]:
        """Evaluate as the engine does."""
        return self.engine.evaluate(w)


def federation(method: Algorithm, options: Mapping[str, Any]) -> Federation:
    """Return 20 clients with digits and a perceptron."""
    (x, y), (test_x, test_y) = data.load("digits").train, data.load("digits").test
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(SEED))
    clients = [(x[order[n::CLIENTS]].flatten(1), y[order[n::CLIENTS]]) for n in range(CLIENTS)]
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
    wanted = Options(batch_size=32, seed=SEED, device="cpu", **options)
    made = prepare(model, clients, (test_x.flatten(1), test_y), method, wanted)
    return replace(made, engine=Reference(made.task))


def accuracy(name: str, attack: str, defense: str) -> float:
    """Train, and return the final accuracy in percent; that of guessing if training diverges."""
    fed = federation(METHODS[name], DEFENSES[defense])
    if (tamper := ATTACKS[attack]) is not None:
        fed = replace(fed, engine=Attacked(fed.engine, tamper))
    try:
        *_, (_, last) = run_rounds(fed, initial_snapshot(fed), ROUNDS)
    except Diverged:
        return 10.0
    return 100 * float(last["accuracy"])


def measure() -> dict[str, dict[str, dict[str, float]]]:
    """Return the accuracies by method, attack and defense."""
    return {
        name: {
            attack: {
                defense: round(accuracy(name, attack, defense), 1)
                for defense in DEFENSES
                if not (name in SPARSE and "aggregation" in DEFENSES[defense])
            }
            for attack in ATTACKS
            if not (name in WITHOUT_V and attack.startswith("V"))
        }
        for name in METHODS
    }


def table(results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Return the results as a Markdown table."""
    lines = [f"| method | attack | {' | '.join(DEFENSES)} |", "|---|---|" + "---:|" * len(DEFENSES)]
    for name, by_attack in results.items():
        for attack, found in by_attack.items():
            cells = (f"{found[d]:.1f}" if d in found else "–" for d in DEFENSES)
            lines.append(f"| `{name}` | {attack} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure unless only the table is wanted, and print the table."""
    if "--table" not in sys.argv[1:]:
        RESULTS.write_text(json.dumps(measure(), indent=2, ensure_ascii=False) + "\n")
    print(table(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()

"""The names, defaults and help texts that ``--help`` shows, without importing torch.

They are declared next to the code that they describe. ``python -m fedsift.cli.catalog`` copies them
to catalog.json; a test fails if that file is out of date.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("catalog.json")
COMMAND = "python -m fedsift.cli.catalog"


@cache
def catalog() -> dict[str, Any]:
    """Return the contents of catalog.json."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def declared() -> dict[str, Any]:
    """Collect what catalog.json should hold from the declarations themselves."""
    from fedsift.algorithms import METHODS
    from fedsift.data import DATASETS
    from fedsift.engine.gpu.stacked import PRECISIONS
    from fedsift.models import MODELS
    from fedsift.runs.config import DEVICES

    return {
        "run": run_settings(),
        "methods": {name: method_settings(name) for name in sorted(METHODS)},
        "datasets": list(DATASETS),
        "models": list(MODELS),
        "devices": list(DEVICES),
        "precisions": list(PRECISIONS),
    }


def run_settings() -> dict[str, dict[str, Any]]:
    """Return the type and default of every field of RunConfig that is an option."""
    from dataclasses import fields

    from fedsift.runs.config import RunConfig

    return {
        field.name: {"type": str(field.type), "default": field.default}
        for field in fields(RunConfig)
        if field.name != "settings"
    }


def method_settings(name: str) -> dict[str, dict[str, Any]]:
    """Return the type, default and help of every setting of a method."""
    from fedsift.algorithms import settings_of

    return {
        key: {"type": type(value).__name__, "default": value, "help": HELP[key]}
        for key, value in settings_of(name).items()
    }


HELP = {
    "local_steps": "L, local mini-batch steps per round.",
    "lr": "Learning rate.",
    "density": "α = k/d, the share of coordinates that is sent, in (0, 1].",
    "beta1": "Decay of the first moment.",
    "beta2": "Decay of the second moment.",
    "eps": "ε inside Adam's square root.",
    "bits": "Bits per coordinate of W, 2 to 8.",
    "down_density": "Share of coordinates that the server sends, in (0, 1].",
    "decay": "Share of the unsent residual that is kept, in [0, 1].",
    "momentum": "Server momentum, in [0, 1).",
    "clip": "Bound on the gradient norm; 0 turns clipping off.",
    "average": "The model is W averaged over about this share of all rounds; 0: W.",
    "outer_lr": "Learning rate of the server.",
    "correction": "α, the share of the last global update that is applied again.",
    "weight_decay": "λ, decoupled weight decay.",
    "warmup_rounds": "Rounds of warm-up.",
}


def write() -> None:
    """Write catalog.json."""
    text = json.dumps(declared(), indent=2, ensure_ascii=False)
    FILE.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()

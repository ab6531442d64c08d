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


def declarations() -> dict[str, Any]:
    """Collect what catalog.json should hold from the declarations themselves."""
    from fedsift.data import DATASETS
    from fedsift.data.authors import AUTHORS
    from fedsift.engine.gpu.arithmetic import PRECISIONS
    from fedsift.models import MODELS
    from fedsift.runs.config import DEVICES

    return {
        "run": run_settings(),
        "methods": method_settings(),
        "wrappers": wrapper_settings(),
        "datasets": list(DATASETS),
        "texts": list(AUTHORS),
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


def method_settings() -> list[dict[str, Any]]:
    """Return the name and the settings of every method."""
    from fedsift.algorithms import describe

    return [{"name": about["name"], "settings": about["settings"]} for about in describe()]


def wrapper_settings() -> list[dict[str, Any]]:
    """Return the name and the settings of every wrapper."""
    from fedsift.algorithms.registry import WRAPPERS, settings_of_wrapper

    return [
        {
            "name": f"{prefix}-NAME",
            "settings": [setting.describe() for setting in settings_of_wrapper(prefix).values()],
        }
        for prefix in sorted(WRAPPERS)
    ]


def write() -> None:
    """Write catalog.json."""
    text = json.dumps(declarations(), indent=2, ensure_ascii=False)
    FILE.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()

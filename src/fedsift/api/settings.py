"""The settings of a run made from Python, as its config.toml holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fedsift.algorithms.settings import NONE
from fedsift.federation.round import Federation
from fedsift.runs.config import MADE_FROM, PYTHON
from fedsift.schedules import describe
from fedsift.simulation import Options, chosen_device

OWN_DATA = "own data"


def settings_of(federation: Federation, options: Options, rounds: int) -> dict[str, Any]:
    """Return the settings of a run, by the names that the command line has for them."""
    algorithm = federation.algorithm
    return {
        MADE_FROM: PYTHON,
        "algorithm": algorithm.name,
        "dataset": OWN_DATA,
        "model": type(federation.task.model).__name__,
        "clients": len(federation.task.clients),
        "rounds": rounds,
        "batch_size": options.batch_size or 0,
        "weights": federation.weighting,
        "partition": "own",
        "participation": options.participation,
        "dropout": options.dropout,
        "min_clients": options.min_clients,
        "max_norm_ratio": options.max_norm_ratio or 0.0,
        "buffers": options.buffers,
        "aggregation": options.aggregation,
        "wire": options.wire,
        "seed": options.seed,
        "device": torch.device(chosen_device(options.device)).type,
        "precision": options.precision,
        "loss": name_of(options.loss),
        "transform": NONE if options.transform is None else name_of(options.transform),
        **({} if options.privacy is None else options.privacy.settings()),
        **secure_settings_of(federation),
        **{key: text_of(value) for key, value in algorithm.settings.items()},
    }


def secure_settings_of(federation: Federation) -> dict[str, Any]:
    """Return the settings of secure aggregation, if there is any."""
    if (secure := federation.secure) is None:
        return {}
    numbers = {"secure_neighbors": secure.neighbors, "secure_threshold": secure.threshold}
    return {"secure": True, **numbers}


def text_of(value: Any) -> Any:
    """Return a setting of a method as it can be written to a file."""
    if callable(value):
        return describe(value)
    return NONE if value is None else value


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a user's function or module.

    >>> name_of(torch.nn.functional.mse_loss), name_of(torch.nn.MSELoss())
    ('mse_loss', 'MSELoss')
    """
    return getattr(function, "__name__", type(function).__name__)

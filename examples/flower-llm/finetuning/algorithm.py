"""The algorithm, which must be the same on the server and the clients."""

from collections.abc import Mapping
from typing import Any

from fedsift import algorithms


def make_algorithm(config: Mapping[str, Any]) -> algorithms.Algorithm:
    """Return sift with the settings in the app's run config."""
    return algorithms.sift(
        density=config["density"],
        local_steps=config["local-steps"],
        lr=config["lr"],
        eps=config["eps"],
    )

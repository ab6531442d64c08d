"""The algorithm, which server and clients must agree on."""

from collections.abc import Mapping
from typing import Any

from fedsift import algorithms


def make_algorithm(config: Mapping[str, Any]) -> algorithms.Algorithm:
    """FedAdam-SSM with the settings of the app's run config."""
    return algorithms.fedadam_ssm(
        density=config["density"], local_steps=config["local-steps"], lr=config["lr"]
    )

"""fedsift on Flower: the same rounds, carried over real sockets.

``FedSift`` stands where ``FedAvg`` stood in a ServerApp, and starts from ``arrays_of`` a model;
``client_app`` makes the ClientApp. Each is imported when it is asked for: Flower starts a process
for every message, and a client has no use for the server's half.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedsift.flower.arrays import arrays_of
    from fedsift.flower.client import client_app
    from fedsift.flower.strategy import FedSift

__all__ = ["FedSift", "arrays_of", "client_app"]


HOMES = {"FedSift": "strategy", "arrays_of": "arrays", "client_app": "client"}
"""Where a name is defined."""


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"fedsift.flower.{HOMES[name]}"), name)

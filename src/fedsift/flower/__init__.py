"""Federations on Flower: the same rounds as in a simulation, over a network.

The strategy :class:`FedSift` is for the ServerApp. An app with train and evaluate functions of its
own needs the mod :func:`sifted` in its ClientApp, and :func:`optimizer_for` if the method averages
Adam's moments. :func:`client_app` makes a ClientApp from a model and data. :func:`arrays_of` turns
a model into the strategy's initial arrays.

============= ==================================================================================
Server        strategy.py: settings and Flower's Strategy interface; sampling.py: how many clients
              take part; protection.py: privacy and robustness; server_model.py: the model, if the
              server has it; run.py: a run in progress; evaluation.py: evaluation by clients;
              engine.py: replies as results of the round; deployment.py: checks of remote uploads,
              and traffic; requests.py: the requests of a round; exchange.py: messages out,
              replies in; pull.py: downloads of bounded size; early_results.py: results that wait
              for their turn; superlink.py: calls that are repeated if they fail
Watching      watch.py: log lines, status.json and report of a run in progress; metrics.py: its
              metrics for Prometheus
Client        client_round.py: a request on a client; client.py: training with the method's steps;
              mod.py and own_training.py: training with the app's own code; store.py: the client's
              file on disk
Secure sums   secure_client.py: a client's replies to the stages of the protocol; secure_rounds.py:
              the server's queries
Privacy       noise.py: the server's noise, and how often it was drawn
Both          protocol.py: requests and replies as Flower messages; arrays.py: models as vectors
Local demo    demo.py: ``fedsift run`` as a Flower app; local.py: all processes of a federation on
              one machine; keys.py: their certificates and keys
Warm rounds   warm.py: a SuperExec that forks app processes
============= ==================================================================================

Names are imported when they are first used. Flower starts a process per message, and a client
does not need the server's modules.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedsift.flower.arrays import arrays_of
    from fedsift.flower.client import client_app
    from fedsift.flower.mod import sifted
    from fedsift.flower.own_training import optimizer_for
    from fedsift.flower.strategy import FedSift

__all__ = ["FedSift", "arrays_of", "client_app", "optimizer_for", "sifted"]


MODULES = {
    "FedSift": "strategy",
    "arrays_of": "arrays",
    "client_app": "client",
    "optimizer_for": "own_training",
    "sifted": "mod",
}
"""The module that defines each name."""


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"fedsift.flower.{MODULES[name]}"), name)

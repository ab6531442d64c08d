"""Evaluation by the clients: its requests, its replies, and their weighted means."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from flwr.app import ArrayRecord, Message, MessageType, RecordDict
from torch import Tensor

from fedsift.flower.arrays import arrays_from_vector
from fedsift.flower.deployment import METADATA_BYTES, Deployment
from fedsift.flower.exchange import Exchange
from fedsift.flower.protocol import TrainRequest
from fedsift.flower.requests import NodeStatus, RoundRequests
from fedsift.seeding import stream

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class EvaluateRequests(RoundRequests):
    """The requests to evaluate the global model after a round.

    They take clients to the state from which the next round starts. The model itself travels only
    if it is not the global W, as in ``sift``.
    """

    message_type: ClassVar[str] = MessageType.EVALUATE

    @cached_property
    def cohort(self) -> tuple[int, ...]:
        """The clients that train: none."""
        return ()

    @property
    def max_reply_bytes(self) -> int:
        """The size above which a reply is refused."""
        return METADATA_BYTES

    @cached_property
    def model(self) -> ArrayRecord | None:
        """The model to evaluate; None if it is the global W."""
        values = self.federation.model_weights(self.snapshot)
        if torch.equal(values, global_values(self.snapshot.state)):
            return None
        return arrays_from_vector(self.federation.task.layout, values)

    def content(self, request: TrainRequest) -> RecordDict:
        """Return the content of the message with a request, and count the bytes of the model."""
        records = super().content(request)
        if self.model is not None:
            records["arrays"] = self.model
            self.federation.wire.bytes_sent += sum(len(x.data) for x in self.model.values())
        return records


def global_values(state: Any) -> Tensor:
    """Return the weights and the buffers of the global state."""
    return torch.cat([state.w, state.b]) if "b" in state else state.w


def evaluating_nodes(
    nodes: Mapping[int, NodeStatus],
    connected: Iterable[int],
    fraction: float,
    least: int,
    seed: int,
    round: int,
) -> list[int]:
    """Draw the nodes that evaluate, among the connected ones that can.

    As in Flower's FedAvg, their number is ``fraction`` of the connected nodes, rounded down, but at
    least ``least``.
    """
    able = [n for n in connected if n in nodes and nodes[n].evaluates]
    able.sort(key=lambda n: nodes[n].client or 0)
    number = min(len(able), max(int(len(able) * fraction), least))
    if not fraction or not number:
        return []
    drawn = stream(seed, "evaluation", round).choice(len(able), number, replace=False)
    return [able[n] for n in sorted(drawn)]


@dataclass
class ClientEvaluation:
    """The clients' evaluation of one round's model: metrics and problems by client."""

    exchange: Exchange
    metrics: dict[int, Metrics] = field(default_factory=dict)
    problems: dict[int, str] = field(default_factory=dict)

    def take(self, replies: Iterable[Message]) -> None:
        """Take the replies as they arrive."""
        for message in replies:
            reply = self.exchange.reply_in(message)
            if reply is None:
                continue
            if reply.outcome == "evaluated":
                self.metrics[reply.client] = reply.metrics
            else:
                self.problems[reply.client] = reply.reason or reply.outcome

    def summary(self) -> dict[str, Any]:
        """Return the column ``evaluation`` of metrics.jsonl."""
        means, refused = weighted_means(self.metrics, self.exchange.requests.federation)
        problems = {**self.missing(), **self.problems, **refused}
        number = len(self.metrics) - len(refused)
        named = {str(client): why for client, why in problems.items()}
        return {"clients": number, "metrics": means, "problems": named}

    def missing(self) -> dict[int, str]:
        """Return why there is no valid reply, by client."""
        exchange, found = self.exchange, {*self.metrics, *self.problems}
        asked = {node: exchange.requests.nodes.get(node) for node in exchange.recipients.values()}
        return {
            status.client: exchange.problems.get(node, exchange.no_reply_reason)
            for node, status in asked.items()
            if status is not None and status.client is not None and status.client not in found
        }


def weighted_means(
    metrics: Mapping[int, Metrics], federation: Deployment
) -> tuple[dict[str, float], dict[int, str]]:
    """Return the mean of each metric over the clients, and the problems of refused clients.

    Clients are weighted by their numbers of samples. A metric that fewer than half of them report
    is left out.
    """
    key, most = federation.weight_key, federation.max_samples
    refused = {
        client: f"its {key!r} is {found.get(key)}, but must be positive and at most {most}"
        for client, found in metrics.items()
        if not 0 < found.get(key, 0) <= most
    }
    accepted = [found for client, found in metrics.items() if client not in refused]
    names = [name for name in dict.fromkeys(n for found in accepted for n in found) if name != key]
    means = {
        name: mean
        for name in names
        if 2 * sum(name in found for found in accepted) >= len(accepted)
        and math.isfinite(mean := weighted_mean(name, key, accepted))
    }
    return means, refused


def weighted_mean(name: str, key: str, metrics: Iterable[Metrics]) -> float:
    """Return the mean of a metric over those that have it, weighted by another one.

    >>> weighted_mean("loss", "n", [{"loss": 1.0, "n": 1.0}, {"loss": 4.0, "n": 2.0}, {"n": 5.0}])
    3.0
    """
    found = [(metric[name], metric[key]) for metric in metrics if name in metric]
    total = math.fsum(weight for _, weight in found)
    return sum(value * (weight / total) for value, weight in found)

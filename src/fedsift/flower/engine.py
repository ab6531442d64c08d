"""The engine of a deployment: it collects updates from SuperNodes instead of computing them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import Result
from torch import Tensor

from fedsift.codec.errors import FrameError
from fedsift.codec.limits import Limits
from fedsift.engine.contract import Job, Missing, Received
from fedsift.flower.arrays import arrays_from_vector
from fedsift.flower.early_results import EarlyResults
from fedsift.flower.exchange import Exchange

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
"""Evaluates a model on the server: (round, arrays) -> metrics."""


@dataclass
class RemoteEngine:
    """Yields the updates of a round as they arrive, and evaluates with the user's function.

    ``enough`` valid updates close a round; None waits for all. ``result`` receives the model and
    its metrics. ``exchange`` and ``replies`` belong to the current round.
    """

    evaluate_fn: EvaluateFn | None
    enough: int | None
    result: Result
    exchange: Exchange | None = None
    replies: Iterable[Message] = ()

    @property
    def current(self) -> Exchange:
        """The exchange of the current round."""
        if self.exchange is None:
            raise RuntimeError("no round has started: call configure_train first")
        return self.exchange

    def train(self, job: Job) -> Iterator[Received | Missing]:
        """Yield the result of each client in the cohort's order, so that sums have fixed bits.

        Results that arrive early wait as encoded frames.
        """
        exchange, early = self.current, EarlyResults()
        waiting, num_valid = deque(job.cohort), 0
        limits = self.upload_limits(job) if self.enough else None
        for message in self.replies:
            result = exchange.result_in(message)
            if result is None:
                continue
            early.put(result)
            while waiting and (next := early.take(waiting[0])):
                waiting.popleft()
                yield next
            num_valid += limits is not None and self.is_valid(result, limits)
            if num_valid == self.enough:
                exchange.no_reply_reason = "the round had enough replies"
                break
        for client in waiting:
            yield early.take(client) or Missing(client, exchange.missing_reason(client))

    def upload_limits(self, job: Job) -> Limits:
        """Return what the uploads of this round must satisfy."""
        requests = self.current.requests
        return requests.federation.upload_limits(job, requests.state)

    def is_valid(self, result: Received | Missing, limits: Limits) -> bool:
        """Whether a result is an update that will be merged."""
        if isinstance(result, Missing):
            return False
        requests = self.current.requests
        federation = requests.federation
        try:
            update = federation.decode_upload(result, limits)
        except FrameError:
            return False
        merged = federation.merged_parts(requests.job, (result.client,), update)
        bound = federation.norm_bound(requests.snapshot)
        return not any(map(bound.violation, bound.norms_of(merged)))

    def evaluate(self, w: Tensor) -> tuple[float | None, float | None]:
        """Return the accuracy and loss that the user's function computes after a round."""
        requests = self.current.requests
        self.result.arrays = arrays_from_vector(requests.federation.task.layout, w)
        metrics = self.evaluate_arrays(requests.round, self.result.arrays)
        return number(metrics.get("accuracy")), number(metrics.get("loss"))

    def evaluate_arrays(self, round: int, arrays: ArrayRecord) -> MetricRecord:
        """Call the user's function and record its metrics; without a function there are none."""
        metrics = self.evaluate_fn(round, arrays) if self.evaluate_fn else None
        if metrics is None:
            return MetricRecord()
        self.result.evaluate_metrics_serverapp[round] = metrics
        return metrics


def number(value: object) -> float | None:
    """Return a metric if it is a number.

    >>> number(1), number([1.0])
    (1.0, None)
    """
    return float(value) if isinstance(value, int | float) else None

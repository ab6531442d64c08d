"""The obviously right engine: one client after another, one step after another.

The fast engines are tested against it.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from fedsift.engine.client import Trainer, chunks_of, one_thread, total_score
from fedsift.engine.contract import ClientResult, Job
from fedsift.task import Task


class Reference:
    """Runs the cohort in a plain loop on the CPU, or wherever the task's tensors are."""

    def __init__(self, task: Task) -> None:
        self.task, self.trainer = task, Trainer(task)

    def train(self, job: Job) -> Iterator[ClientResult]:
        """Every cohort member's result, one after another."""
        for client in job.cohort:
            with one_thread():
                result = self.trainer.train(job, client)
            yield result

    def evaluate(self, w: Tensor) -> tuple[float | None, float | None]:
        """Accuracy (for class labels) and mean loss on the test set, in chunks."""
        with one_thread():
            scores = [self.trainer.score(w, chunk) for chunk in chunks_of(self.task)]
        return total_score(self.task, scores)

"""The reference engine: one client after another, one step after another.

It is the simplest correct engine. The fast engines are tested against it.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from fedsift.engine.client import Trainer
from fedsift.engine.contract import ClientResult, Job
from fedsift.engine.scoring import Score, num_chunks, total_score
from fedsift.task import Task
from fedsift.task.threads import one_thread


class Reference:
    """Train the cohort in a plain loop on the device of the task's tensors."""

    def __init__(self, task: Task) -> None:
        self.task, self.trainer = task, Trainer(task)

    def train(self, job: Job) -> Iterator[ClientResult]:
        """Yield the result of each client in the cohort."""
        for client in job.cohort:
            with one_thread():
                result = self.trainer.train(job, client)
            yield result

    def evaluate(self, w: Tensor) -> tuple[float | None, float | None]:
        """Return accuracy (for class labels) and mean loss on the test set."""
        scores = [self.score(w, chunk) for chunk in range(num_chunks(self.task))]
        return total_score(self.task, scores)

    def score(self, w: Tensor, chunk: int) -> Score:
        """Return the score of weights w on a chunk of the test set."""
        with one_thread():
            return self.trainer.score(w, chunk)

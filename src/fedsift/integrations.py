"""Log the rounds of a simulation to Weights & Biases, MLflow or TensorBoard.

Each function takes an object of the tool that you have opened, and returns a function for
``on_round=``, which logs every number in the round's record. The step is the round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fedsift.simulation import Record, numbers_in

if TYPE_CHECKING:
    from torch import nn

OnRound = Callable[..., None]
"""What :func:`fedsift.simulate` calls with each record and the global model."""


def wandb_logger(run: Any) -> OnRound:
    """Log each round to a Weights & Biases run, which ``wandb.init()`` returns."""

    def log(record: Record, model: nn.Module | None = None) -> None:
        run.log(numbers_in(record), step=record["round"])

    return log


def mlflow_logger(run: Any) -> OnRound:
    """Log each round to an MLflow run, which ``mlflow.start_run()`` returns."""
    import mlflow

    def log(record: Record, model: nn.Module | None = None) -> None:
        mlflow.log_metrics(numbers_in(record), step=record["round"], run_id=run.info.run_id)

    return log


def tensorboard_logger(writer: Any) -> OnRound:
    """Log each round to a ``torch.utils.tensorboard.SummaryWriter``."""

    def log(record: Record, model: nn.Module | None = None) -> None:
        for name, value in numbers_in(record).items():
            writer.add_scalar(name, value, record["round"])

    return log

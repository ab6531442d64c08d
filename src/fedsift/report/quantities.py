"""What a run measured of its model: the columns of its metrics that a report can draw."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fedsift.engine.evaluation import OWN_COLUMNS
from fedsift.report.collect import ReportedRun
from fedsift.simulation import Record, numbers_in

Value = Callable[[Record], float | None]


@dataclass(frozen=True)
class Quantity:
    """A column of the metrics, its title, and whether it is a share, shown in percent."""

    key: str
    title: str
    is_share: bool = False

    def __call__(self, record: Record) -> float | None:
        """Return the value in a record; None if it was not measured."""
        value = record.get(self.key)
        return None if value is None else float(value)


ACCURACY = Quantity("accuracy", "test accuracy", is_share=True)
PERPLEXITY = Quantity("perplexity", "test perplexity")
LOSS = Quantity("loss", "test loss")
TRAIN_LOSS = Quantity("train_loss", "training loss")


def quantities_of(runs: Iterable[ReportedRun]) -> list[Quantity]:
    """Return what was measured of the model in any of the runs: own metrics come last."""
    keys = {key: None for run in runs for record in run.history for key in numbers_in(record)}
    known = [quantity for quantity in (ACCURACY, PERPLEXITY, LOSS) if quantity.key in keys]
    own = [Quantity(key, key) for key in keys if key not in (*OWN_COLUMNS, "accuracy", "loss")]
    return [*known, *own]

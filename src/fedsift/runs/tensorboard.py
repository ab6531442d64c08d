"""A run's metrics as TensorBoard events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from fedsift.integrations import tensorboard_logger
from fedsift.simulation import Record


def log_to_tensorboard(records: Iterable[Record], path: Path) -> Iterator[Record]:
    """Yield the records, and write each to ``path/tensorboard``."""
    from torch.utils.tensorboard import SummaryWriter

    # A resumed run yields its earlier records again, so the older event files are purged.
    with SummaryWriter(str(path / "tensorboard"), purge_step=0) as writer:
        log = tensorboard_logger(writer)
        for record in records:
            log(record)
            yield record

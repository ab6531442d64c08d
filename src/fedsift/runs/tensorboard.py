"""A run's metrics as TensorBoard events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from fedsift.runs.config import ConfigError
from fedsift.simulation import Record


def logged(records: Iterable[Record], path: Path) -> Iterator[Record]:
    """Pass records through, writing each to ``path/tensorboard``."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "TensorBoard is not installed: pip install 'fedsift[tensorboard]'"
        ) from None
    # A resumed run hands out its old records again: start the event file anew at round 0.
    with SummaryWriter(str(path / "tensorboard"), purge_step=0) as writer:
        for record in records:
            for name, value in record.items():
                if name != "round" and value is not None:
                    writer.add_scalar(name, value, record["round"])
            yield record

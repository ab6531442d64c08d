"""A run's metrics as TensorBoard events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

from fedsift.errors import ConfigError
from fedsift.integrations import tensorboard_logger
from fedsift.simulation import Record


def require_tensorboard() -> None:
    """Refuse to start without TensorBoard."""
    if find_spec("tensorboard") is None:
        raise ConfigError("TensorBoard is not installed: pip install 'fedsift[tensorboard]'")


def log_to_tensorboard(records: Iterable[Record], path: Path) -> Iterator[Record]:
    """Yield the records, and write each to ``path/tensorboard``."""
    from torch.utils.tensorboard import SummaryWriter

    # A resumed run yields its earlier records again, so the older event files are purged.
    with SummaryWriter(str(path / "tensorboard"), purge_step=0) as writer:
        log = tensorboard_logger(writer)
        for record in records:
            log(record)
            yield record

"""Where a round's local training runs."""

from fedsift.engine.forked import Forked
from fedsift.engine.reference import Reference
from fedsift.engine.stacked import Stacked
from fedsift.engine.task import ClientResult, Engine, Job, Task

__all__ = ["ClientResult", "Engine", "Forked", "Job", "Reference", "Stacked", "Task"]

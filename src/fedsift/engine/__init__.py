"""Where a round's local training runs."""

from fedsift.engine.ranks import Ranks
from fedsift.engine.reference import Reference
from fedsift.engine.stacked import Stacked
from fedsift.engine.task import ClientResult, Engine, Job, Task

__all__ = ["ClientResult", "Engine", "Job", "Ranks", "Reference", "Stacked", "Task"]

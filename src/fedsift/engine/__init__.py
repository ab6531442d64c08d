"""Engines: run the local training of one round."""

from fedsift.engine.contract import ClientResult, Engine, Job
from fedsift.engine.gpu.stacked import Stacked
from fedsift.engine.processes.forked import Forked
from fedsift.engine.reference import Reference
from fedsift.task import Task

__all__ = ["ClientResult", "Engine", "Forked", "Job", "Reference", "Stacked", "Task"]

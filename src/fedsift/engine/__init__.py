"""Engines: run the local training of one round.

- ``contract.py``: what an engine receives and returns
- ``client.py``: the local training of one client
- ``batches.py``: batches that are made at every use, from Datasets and transforms
- ``scoring.py``, ``predictions.py``: accuracy and loss on the test set
- ``evaluation.py``: what else is measured of the global model: the user's metrics
- ``client_tests.py``: its accuracy or perplexity on each client
- ``reference.py``: the simplest engine, which trains the clients one after another
- ``processes/``: engines that spread the clients over processes
- ``cpu/``: C kernels for small networks on a CPU
- ``gpu/``: the engine that trains all clients at once on a GPU
- ``fused.py``: a method's local step in place, with one kernel for Adam
- ``memory_format.py``: the memory format of images
"""

from fedsift.engine.contract import ClientResult, Engine, Job
from fedsift.engine.gpu.stacked import Stacked
from fedsift.engine.processes.forked import Forked
from fedsift.engine.reference import Reference
from fedsift.task import Task

__all__ = ["ClientResult", "Engine", "Forked", "Job", "Reference", "Stacked", "Task"]

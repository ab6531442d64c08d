"""The learning task: a model, a loss and the clients' data, apart from how they are trained.

- ``task.py``: the task and the batches of its clients
- ``losses.py``: losses that engines and metrics recognize
- ``labels.py``: the classes of each client's data
- ``weights.py``: the clients' weights in the mean
- ``samples.py``: a client's samples, in every format that is accepted
- ``checks.py``: checks of a model and its data before training starts
- ``broadcasting.py``: a loss or metric that compares each output with all labels is refused
- ``synthetic.py``: the shapes of samples that a method synthesizes
- ``threads.py``: the number of threads
- ``user_code.py``: functions of the user's own modules
"""

from fedsift.task.checks import check_model, check_task, statistics_of
from fedsift.task.samples import Data
from fedsift.task.task import (
    Epochs,
    Loss,
    NumSteps,
    RemoteClients,
    Task,
    Transform,
    has_hooks,
    has_statistics,
    sample_without_replacement,
)
from fedsift.task.weights import WEIGHTS, Weights, check_weights, weight_of

__all__ = [
    "WEIGHTS",
    "Data",
    "Epochs",
    "Loss",
    "NumSteps",
    "RemoteClients",
    "Task",
    "Transform",
    "Weights",
    "check_model",
    "check_task",
    "check_weights",
    "has_hooks",
    "has_statistics",
    "sample_without_replacement",
    "statistics_of",
    "weight_of",
]

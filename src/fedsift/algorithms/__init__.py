"""Federated methods, one file each. Each function makes an :class:`Algorithm` from its settings.

The capitalized names and the functions ``method``, ``always``, ``dense``, ``sparse``, ``top_k``,
``num_kept``, ``residual_after``, ``broadcast_all``, ``local_sgd``, ``directions`` and
``register_coder`` are what a method of your own is made of.

- ``method.py``: the contract of a method
- ``step_context.py``: what a local step knows besides the state and the gradient
- ``checks.py``: checks of what a method declares and returns
- ``example_message.py``: what clients send for example, the form of a method's messages
- ``settings.py``: the settings that methods share
- ``registry.py``: the methods by name
- ``compressed.py``: compresses any method that sends ΔW in full, with the pieces of
  ``compression.py``
- ``buffers.py``: running statistics as one more vector of any method's state
- ``directions.py``: random directions that everyone rebuilds from the seed

To add a method, write its file, export it here, and run ``python -m fedsift.cli.catalog`` for the
command line.
"""

from fedsift.adam import AdamStep
from fedsift.algorithms.compressed import compressed
from fedsift.algorithms.decomfl import decomfl
from fedsift.algorithms.directions import directions
from fedsift.algorithms.e3sfc import e3sfc
from fedsift.algorithms.efficient_adam import efficient_adam
from fedsift.algorithms.fairness_top import fairness_top
from fedsift.algorithms.fedadam import fedadam
from fedsift.algorithms.fedadam_ssm import fedadam_ssm
from fedsift.algorithms.fedadam_ssm_m import fedadam_ssm_m
from fedsift.algorithms.fedadam_ssm_v import fedadam_ssm_v
from fedsift.algorithms.fedadam_top import fedadam_top
from fedsift.algorithms.fedadamw import fedadamw
from fedsift.algorithms.fedavg import fedavg
from fedsift.algorithms.fedopt import fedopt
from fedsift.algorithms.fedprox import fedprox
from fedsift.algorithms.fedsgd import SgdStep, fedsgd, local_sgd
from fedsift.algorithms.method import (
    Algorithm,
    Context,
    LocalUpdate,
    Memory,
    Phase,
    always,
    broadcast_all,
)
from fedsift.algorithms.onebit_adam import onebit_adam
from fedsift.algorithms.registry import (
    METHODS,
    Method,
    describe,
    find,
    for_rounds,
    method,
    normalized_name,
    registered,
    settings_of,
)
from fedsift.algorithms.scaffold import scaffold
from fedsift.algorithms.settings import (
    BELOW_ONE,
    COUNT,
    FRACTION,
    NONNEGATIVE,
    POSITIVE,
    SHARE,
    Beta1,
    Beta2,
    Density,
    Epsilon,
    LearningRate,
    LocalSteps,
    Range,
    Setting,
)
from fedsift.algorithms.sift import sift
from fedsift.algorithms.sift_common import sift_common
from fedsift.algorithms.sparse_fedsgd import sparse_fedsgd
from fedsift.algorithms.sparseloco import sparseloco
from fedsift.algorithms.step_context import StepContext
from fedsift.codec.update import Parts, dense, residual_after, sparse
from fedsift.codec.values import (
    Bit,
    Integer,
    Linear,
    Log,
    Means,
    Quantized,
    Sign,
    register_coder,
)
from fedsift.selection.masks import num_kept, top_k
from fedsift.task import Epochs
from fedsift.vector import State

__all__ = [
    "BELOW_ONE",
    "COUNT",
    "FRACTION",
    "METHODS",
    "NONNEGATIVE",
    "POSITIVE",
    "SHARE",
    "AdamStep",
    "Algorithm",
    "Beta1",
    "Beta2",
    "Bit",
    "Context",
    "Density",
    "Epochs",
    "Epsilon",
    "Integer",
    "LearningRate",
    "Linear",
    "LocalSteps",
    "LocalUpdate",
    "Log",
    "Means",
    "Memory",
    "Method",
    "Parts",
    "Phase",
    "Quantized",
    "Range",
    "Setting",
    "SgdStep",
    "Sign",
    "State",
    "StepContext",
    "always",
    "broadcast_all",
    "compressed",
    "decomfl",
    "dense",
    "describe",
    "directions",
    "e3sfc",
    "efficient_adam",
    "fairness_top",
    "fedadam",
    "fedadam_ssm",
    "fedadam_ssm_m",
    "fedadam_ssm_v",
    "fedadam_top",
    "fedadamw",
    "fedavg",
    "fedopt",
    "fedprox",
    "fedsgd",
    "find",
    "for_rounds",
    "local_sgd",
    "method",
    "normalized_name",
    "num_kept",
    "onebit_adam",
    "register_coder",
    "registered",
    "residual_after",
    "scaffold",
    "settings_of",
    "sift",
    "sift_common",
    "sparse",
    "sparse_fedsgd",
    "sparseloco",
    "top_k",
]

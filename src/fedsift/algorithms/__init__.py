"""Federated methods, one file each. Each function makes an :class:`Algorithm` from its settings.

``method.py`` holds the contract of a method, ``settings.py`` the settings that methods share, and
``registry.py`` the methods by name. ``compressed.py`` compresses any method that sends ΔW in full,
with the pieces in ``compression.py``. To add a method, write its file, export it here, and run
``python -m fedsift.cli.catalog`` for the command line.
"""

from fedsift.algorithms.compressed import compressed
from fedsift.algorithms.decomfl import decomfl
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
from fedsift.algorithms.fedsgd import fedsgd
from fedsift.algorithms.method import Algorithm, Context, Memory, Phase, always
from fedsift.algorithms.onebit_adam import onebit_adam
from fedsift.algorithms.registry import (
    METHODS,
    Method,
    describe,
    find,
    for_rounds,
    method,
    normalized_name,
    settings_of,
)
from fedsift.algorithms.scaffold import scaffold
from fedsift.algorithms.settings import Setting
from fedsift.algorithms.sift import sift
from fedsift.algorithms.sparse_fedsgd import sparse_fedsgd
from fedsift.algorithms.sparseloco import sparseloco
from fedsift.algorithms.step_context import StepContext

__all__ = [
    "METHODS",
    "Algorithm",
    "Context",
    "Memory",
    "Method",
    "Phase",
    "Setting",
    "StepContext",
    "always",
    "compressed",
    "decomfl",
    "describe",
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
    "method",
    "normalized_name",
    "onebit_adam",
    "scaffold",
    "settings_of",
    "sift",
    "sparse_fedsgd",
    "sparseloco",
]

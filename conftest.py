"""Set up doctests, interpret Triton kernels without a GPU, and choose which tests run first."""

import os
from importlib.util import find_spec
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch

needs_triton = [
    *(f"engine/gpu/{name}" for name in ("triton", "layers", "network", "channels_last")),
    *(f"engine/gpu/one_batch/{name}" for name in ("triton", "triton_blocks", "fused")),
    *(f"codec/{name}" for name in ("triton", "gpu_sizes")),
    *(f"selection/{name}" for name in ("triton", "gpu")),
]
collect_ignore = [] if find_spec("triton") else [f"src/fedsift/{name}.py" for name in needs_triton]
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports a kernel
if not find_spec("flwr"):
    collect_ignore += ["src/fedsift/flower", "tests/flower"]
collect_ignore_glob = ["*/conftest.py"]  # no doctests, and modules of one name


@pytest.fixture(autouse=True)
def _imports(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update(torch=torch, np=np, nn=torch.nn)


FEDERATIONS = "tests/flower/test_de"
SLOW = (
    FEDERATIONS,
    "tests/engine/test_torchrun.py",
    "tests/runs/test_resume.py",
    "tests/reproduce/",
    "tests/cli/",
    "tests/engine/test_layers.py",
    "tests/selection/test_selection_gpu.py",
    "tests/report/",
    "tests/test_docs.py",
)
"""Tests of real processes, of long runs and of interpreted kernels."""
ALWAYS = ("tests/test_recorded_bits.py", "tests/test_code_metrics.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--quick``."""
    parser.addoption("--quick", action="store_true", help="run a fixed tenth of the fast tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start with the federations of real processes, on two workers; keep a tenth if asked to."""
    federations = [item for item in items if item.nodeid.startswith(FEDERATIONS)]
    others = [item for item in items if not item.nodeid.startswith(FEDERATIONS)]
    third = len(items) // 3  # pytest-xdist deals the tests to three workers in this order
    first, second = federations[::2], federations[1::2]
    rest = third - len(first)
    items[:] = [*first, *others[:rest], *second, *others[rest:]]
    if config.getoption("--quick"):
        config.hook.pytest_deselected(items=[x for x in items if not is_quick(x.nodeid)])
        items[:] = [item for item in items if is_quick(item.nodeid)]


def is_quick(test: str) -> bool:
    """Whether ``--quick`` runs a test: always the same ones, spread over all folders."""
    is_chosen = not test.startswith(SLOW) and crc32(test.encode()) % 10 == 0
    return is_chosen or test.startswith(ALWAYS)

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


FIRST = (
    ("tests/flower/test_deployment.py",),
    ("tests/flower/test_deployment_soak.py", "tests/flower/test_demo.py"),
    ("tests/cli/test_full_runs.py", "tests/report/test_export.py"),
    ("tests/flower/test_readme_app.py", "tests/test_docs.py"),
)
"""The slowest tests, by the worker that begins with them. The first two mostly wait."""
SLOW = (
    "tests/flower/test_de",
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
    """Let each worker begin with slow tests; keep a tenth of all if asked to."""
    if config.getoption("--quick"):
        config.hook.pytest_deselected(items=[x for x in items if not is_quick(x.nodeid)])
        items[:] = [item for item in items if is_quick(item.nodeid)]
    items[:] = dealt(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def dealt(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Return tests in the order in which pytest-xdist deals equal shares of them to workers.

    A worker that has finished its share takes tests from the end of another one's.
    """
    order: list[pytest.Item] = []
    others = [x for x in items if not x.nodeid.startswith(sum(FIRST, ()))]
    for worker in range(workers):
        prefixes = sum(FIRST[worker::workers], ())
        slow = [x for prefix in prefixes for x in items if x.nodeid.startswith(prefix)]
        share = (len(items) - len(order)) // (workers - worker)
        rest = max(share - len(slow), 0)
        order += [*slow, *others[:rest]]
        others = others[rest:]
    return order + others


def is_quick(test: str) -> bool:
    """Whether ``--quick`` runs a test: always the same ones, spread over all folders."""
    is_chosen = not test.startswith(SLOW) and crc32(test.encode()) % 10 == 0
    return is_chosen or test.startswith(ALWAYS)

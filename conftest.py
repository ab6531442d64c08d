"""Every doctest has torch and np; the GPU kernels are interpreted where there is no GPU."""

import os
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

needs_triton = [
    *(f"engine/gpu/{name}" for name in ("triton", "layers", "network", "channels_last")),
    *(f"codec/{name}" for name in ("triton", "gpu_sizes")),
    *(f"selection/{name}" for name in ("triton", "gpu")),
]
collect_ignore = [] if find_spec("triton") else [f"src/fedsift/{name}.py" for name in needs_triton]
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports a kernel
if not find_spec("flwr"):
    collect_ignore += ["src/fedsift/flower", "tests/flower"]


@pytest.fixture(autouse=True)
def _imports(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update(torch=torch, np=np, nn=torch.nn)

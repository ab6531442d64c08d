"""Every doctest may use torch and np without importing them."""

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

needs_triton = ["kernels", "layers", "network"]
collect_ignore = (
    [] if find_spec("triton") else [f"src/fedsift/engine/{name}.py" for name in needs_triton]
)


@pytest.fixture(autouse=True)
def _imports(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update(torch=torch, np=np, nn=torch.nn)

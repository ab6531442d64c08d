"""Every doctest may use torch and np without importing them."""

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

collect_ignore = [] if find_spec("triton") else ["src/fedsift/engine/kernels.py"]


@pytest.fixture(autouse=True)
def _imports(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update(torch=torch, np=np, nn=torch.nn)

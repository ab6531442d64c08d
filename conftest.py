"""Every doctest may use torch and np without importing them."""

from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def _imports(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update(torch=torch, np=np, nn=torch.nn)

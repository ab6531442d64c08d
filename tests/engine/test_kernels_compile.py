"""Triton compiles the kernels for a GPU, with or without one: what its interpreter cannot show."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: there are no kernels to compile")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "traffic.py"


def test_the_kernels_of_transformers_compile_without_spilling_registers():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), "vit-tiny", "char-transformer", "--compile"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr[-2000:]
    compiled = [line for line in found.stdout.splitlines() if "B spilled" in line]
    assert len(compiled) >= 20
    assert all(", 0 B spilled" in line for line in compiled)

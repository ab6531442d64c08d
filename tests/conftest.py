"""Shared by all tests: one torch thread a process, and hypothesis without a clock."""

import signal
from pathlib import Path

import hypothesis
import pytest
import torch

from fedsift import native

torch.set_num_threads(1)
# A shell's background job ignores Ctrl-C, and so would the processes that tests start and stop.
signal.signal(signal.SIGINT, signal.default_int_handler)
hypothesis.settings.register_profile("fedsift", deadline=None, max_examples=50)
hypothesis.settings.load_profile("fedsift")


@pytest.fixture
def fresh_kernels(tmp_path, monkeypatch):
    """Recompile the C kernels for one test, and unload them afterwards."""
    monkeypatch.setenv("HOME", str(tmp_path))
    native.load.cache_clear()
    yield
    native.load.cache_clear()


@pytest.fixture(params=[(), ("-mavx2", "-mfma")], ids=str)
def narrow_vectors(request, fresh_kernels, monkeypatch):
    """C for processors with shorter vectors than this one may have."""
    about = Path("/proc/cpuinfo")
    if request.param and not (about.exists() and "avx2" in about.read_text()):
        pytest.skip("needs a processor that says it has AVX2")
    monkeypatch.setattr(native, "FOR_THIS_PROCESSOR", (request.param,))

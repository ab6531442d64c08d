"""The codec's C kernels read and add exactly what the Python implementations do."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsift.codec import FrameError, native, range_coder
from fedsift.codec.index import Entropy
from fedsift.codec.index_gaps import low_bits
from fedsift.codec.native import NativeDecoder, add_at
from fedsift.codec.range_coder import PythonDecoder

pytestmark = pytest.mark.skipif(native.LIBRARY.load() is None, reason="needs a C compiler")
LOW = low_bits(3)
LOWEST = np.arange(len(LOW), dtype=np.int64) << 40


def read(decoder, tables):
    """Everything that a decoder reads, or that it refuses the code."""
    found = []
    try:
        for counts, n in tables:
            weights = range_coder.probabilities(range_coder.log_weights(torch.tensor(counts)))
            buckets = decoder.symbols(weights.numpy(), n)
            found += [buckets.tolist(), decoder.numbers(buckets, LOWEST, LOW).tolist()]
    except FrameError as problem:
        found.append(str(problem))
    return found


counts = st.lists(st.sampled_from([0, 0, 1, 3, 10, 1000, 10**6]), min_size=1, max_size=240)
tables = st.lists(st.tuples(counts.filter(any), st.integers(0, 60)), min_size=1, max_size=3)


@given(st.binary(max_size=400), tables)
def test_any_bytes_give_the_symbols_of_the_python_decoder(code, tables):
    assert read(NativeDecoder(code), tables) == read(PythonDecoder(code), tables)


@given(st.integers(0, 2**32), st.floats(0.0005, 0.9), st.integers(1, 200_000))
def test_masks_are_decoded_without_a_compiler_as_well(seed, density, d):
    indices = np.flatnonzero(np.random.default_rng(seed).random(d) < density)
    layers = np.array([0, d // 3]) if d > 9 else np.array([0])
    payload = Entropy().encode(indices, d, layers)
    for found in (None, native.LIBRARY.load()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native.Library, "load", lambda self, found=found: found)
            assert np.array_equal(Entropy().decode(payload, len(indices), d, layers), indices)


def test_bytes_that_no_encoder_writes_are_refused():
    weights = range_coder.probabilities(torch.tensor([192, 192])).numpy()
    for decoder in (NativeDecoder, PythonDecoder):
        with pytest.raises(FrameError, match="no encoder"):
            decoder(b"\xff" * 8).symbols(weights, 1)


@given(st.integers(0, 2**32), st.integers(1, 3000), st.floats(0, 1))
def test_sums_have_the_bits_of_torch(seed, d, density):
    draw = torch.Generator().manual_seed(seed)
    target = torch.randn(d, generator=draw)
    indices = torch.nonzero(torch.rand(d, generator=draw) < density)[:, 0]
    values = torch.randn(len(indices), generator=draw) * 1e-3
    expected = target.clone().index_add_(0, indices, values)
    add_at(target, indices, values)
    assert torch.equal(target, expected)


def test_indices_outside_of_the_vector_are_refused():
    for indices in ([-1, 0], [0, 3], [2**40, 0], [3, 1]):
        with pytest.raises(IndexError):
            add_at(torch.zeros(3), torch.tensor(indices), torch.ones(2))
    with pytest.raises(ValueError, match="2 indices, but 1 values"):
        add_at(torch.zeros(3), torch.tensor([0, 1]), torch.ones(1))

"""Threads decode and add in an order that fixes every bit, and hold few updates at a time."""

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsift.codec import Float, Linear, Update, dense, sparse
from fedsift.codec.threads import Threads, finished
from fedsift.codec.update import MIN_SLICED, WeightedSum
from fedsift.selection.masks import top_k
from fedsift.vector import State

D = 4 * MIN_SLICED


def updates(draw, coders):
    for coder in coders:
        x = torch.randn(1, D, generator=draw)
        values = {"w": x, "m": x.roll(1), "v": x.square()}
        chosen = dict.fromkeys(values, coder)
        yield Update(sparse(values, top_k(x, D // 3), chosen), (float(x[0, 0].abs() + 1),))
        yield Update(dense(values, coder), (3.0,))


@given(
    st.integers(0, 2**32),
    st.integers(1, 5),
    st.lists(st.sampled_from([Float("float32"), Linear(4)]), max_size=3),
)
def test_any_number_of_threads_gives_the_bits_of_the_serial_sum(seed, count, coders):
    serial, threaded = (WeightedSum(State.start(torch.zeros(D))) for _ in range(2))
    with Threads(count) as threads:
        for update in updates(torch.Generator().manual_seed(seed), coders):
            serial.add(update)
            threaded.add(update, threads)
    assert serial.weight == threaded.weight
    for one, other in zip(serial.total, threaded.total, strict=True):
        assert torch.equal(one, other)


def test_results_come_in_order_and_few_are_started_ahead():
    started, done = [], []

    def work(n):
        time.sleep(0.02 * (n % 3 == 0))
        return n

    def calls(threads):
        for n in range(40):
            started.append(n)
            yield threads.start(work, n) if n % 5 else finished(n)

    with Threads(2) as threads:
        for n in threads.in_order(calls(threads)):
            done.append(n)
            assert len(started) - len(done) <= 5
    assert done == list(range(40))


def test_a_problem_in_a_thread_reaches_the_caller():
    def fail(slice, slices):
        if slice == slices - 1:
            raise ValueError("no room")

    with Threads(3) as threads, pytest.raises(ValueError, match="no room"):
        threads.in_slices(fail)


def test_the_threads_end_with_the_block():
    with Threads(2) as threads:
        list(threads.in_order(threads.start(time.sleep, 0) for _ in range(4)))
    assert not [t for t in threading.enumerate() if t.name.startswith("fedsift")]

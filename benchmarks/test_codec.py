"""Speed of the codec on one core: selection, encoding, decoding, aggregation.

    python -m pytest benchmarks/test_codec.py                      d = 10^6 and 10^7
    FEDSIFT_LARGE=1 python -m pytest benchmarks/test_codec.py      and 10^8 (needs about 8 GiB)

The frame is that of FedAdam-SSM at 5 %: one mask and three bfloat16 tensors. The last tests check
ratios of times within one run, as absolute times depend on the machine.
"""

import os
import subprocess
import sys
import time
from statistics import median

import pytest
import torch

from fedsift.codec import Float, Spec, Update, decode, encode, sparse
from fedsift.codec.update import WeightedSum
from fedsift.selection.masks import num_kept, top_k
from fedsift.vector import Layout, State

LARGE = [10**8] if os.environ.get("FEDSIFT_LARGE") else []
SIZES = [10**6, 10**7, *LARGE]
BF16 = Float("bfloat16")
torch.set_num_threads(1)


def layout_of(d):
    """A layout of ten layers of different sizes."""
    sizes = [d // 55 * i for i in range(1, 10)]
    shapes = tuple((size,) for size in (*sizes, d - sum(sizes)))
    return Layout(tuple(f"layer{i}" for i in range(10)), shapes, torch.float32)


def update_of(d, seed=0):
    draw = torch.Generator().manual_seed(seed)
    w = torch.randn(1, d, generator=draw)
    values = {"w": w, "m": w * 0.1, "v": w.square()}
    return Update(sparse(values, top_k(w, num_kept(0.05, d)), dict.fromkeys(values, BF16)), (64.0,))


@pytest.fixture(scope="module", params=SIZES)
def case(request):
    d = request.param
    update, spec = update_of(d), Spec(layout_of(d), "fedadam-ssm", 1)
    return d, update, spec, encode(update, spec)


def test_select(benchmark, case):
    x = torch.randn(1, case[0])
    benchmark.pedantic(top_k, (x, num_kept(0.05, case[0])), rounds=5, warmup_rounds=1)


def test_select_by_torch(benchmark, case):
    x = torch.randn(1, case[0])
    benchmark.pedantic(lambda: x.abs().topk(num_kept(0.05, case[0])), rounds=3, warmup_rounds=1)


def test_encode(benchmark, case):
    _, update, spec, frame = case
    assert benchmark.pedantic(encode, (update, spec), rounds=5, warmup_rounds=1) == frame


def test_decode(benchmark, case):
    _, _, spec, frame = case
    benchmark.pedantic(decode, (frame, spec.layout), rounds=5, warmup_rounds=1)


def test_aggregate_20_frames(benchmark, case):
    d, _, spec, frame = case

    def aggregate():
        total = WeightedSum(State.start(torch.zeros(d)))
        for _ in range(20):
            total.add(decode(frame, spec.layout))
        return total.mean()

    benchmark.pedantic(aggregate, rounds=2)


def seconds(work, repeat=7):
    work()
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return median(times)


def test_the_ratios_of_times_at_ten_million():
    """Exact top-k takes at most a quarter of torch.topk's time; encoding at most that of top-k."""
    d = 10**7
    k = num_kept(0.05, d)
    x = torch.randn(1, d)
    update, spec = update_of(d), Spec(layout_of(d), "fedadam-ssm", 1)
    frame = encode(update, spec)
    theirs = seconds(lambda: x.abs().topk(k), 3)
    ours = seconds(lambda: top_k(x, k))
    encoding = seconds(lambda: encode(update, spec))
    decoding = seconds(lambda: decode(frame, spec.layout))
    print(
        f"\ntorch.topk {1e3 * theirs:.0f} ms, top_k {1e3 * ours:.0f} ms ({theirs / ours:.1f} x), "
        f"encode {1e3 * encoding:.0f} ms, decode {1e3 * decoding:.0f} ms"
    )
    assert theirs / ours >= 4
    assert encoding <= ours
    assert decoding <= ours


PEAK = """
import re, sys
sys.path.insert(0, "benchmarks")
from test_codec import *

def memory(name):
    return 1024 * int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1])

frame, d = open(sys.argv[1], "rb").read(), int(sys.argv[2])
layout = layout_of(d)
open("/proc/self/clear_refs", "w").write("5")  # resets the peak
before = memory("VmRSS")
total = WeightedSum(State.start(torch.zeros(d)))
for _ in range(20):
    total.add(decode(frame, layout))
print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize("d", SIZES[1:])
def test_aggregating_20_frames_needs_little_memory(d, tmp_path):
    """At most three times the dense sum of W, M and V, for any number of frames."""
    file = tmp_path / "frame"
    file.write_bytes(encode(update_of(d), Spec(layout_of(d))))
    command = [sys.executable, "-c", PEAK, str(file), str(d)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    dense = 3 * 4 * d
    assert int(done.stdout) >= dense, "the peak must include at least the sum"
    print(f"\nd = {d:.0e}: {int(done.stdout) / dense:.2f} times the dense sum")
    assert int(done.stdout) <= 3 * dense

"""Time a round on this machine, part by part, and compute the physical limit.

The limit is the time for the arithmetic of the local steps, or for the memory traffic of W, M, V
and the gradients, at the speed at which this machine multiplies large matrices and copies long
vectors. It counts nothing else, so no engine can reach it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedsift.algorithms.fedadam_ssm import fedadam_ssm
from fedsift.algorithms.method import Context, LocalUpdate
from fedsift.cli.timed_models import CLIENTS, loss_for, model_for, random_samples, work_for
from fedsift.codec.frame import Spec, encoded_sizes
from fedsift.codec.update import Update
from fedsift.federation.round import Federation
from fedsift.federation.snapshot import Snapshot
from fedsift.simulation import Options, prepare
from fedsift.task.samples import first_samples
from fedsift.vector import State

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
LONG_SIDE, LONG_TIMES = 4096, 4
"""Matrix products that take a GPU about as long as the local steps of a round of the CNN."""
ADAM_TRAFFIC = 8
"""Vectors read and written by a step: W, M, V and the gradient, each read and written once."""


@dataclass(frozen=True)
class Peaks:
    """The measured peak speeds: floating-point operations and bytes per second."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Timing:
    """Seconds of one round of a model, by part, and the limit for its local steps."""

    model: str
    work: str
    parameters: int
    device: str
    precision: str
    round: float
    train: float
    select: float
    merge: float
    evaluate: float
    flops: float
    bytes: float
    limit: float

    @property
    def ratio(self) -> float:
        """The time of a round divided by the limit."""
        return self.round / self.limit


def bench(
    models: Sequence[str], device: str, precision: str = "fp32", rounds: int = 5
) -> Iterator[Timing]:
    """Time a round of FedAdam-SSM for each model."""
    peaks = measure_peaks(device, precision)
    for name in models:
        yield time_model(name, device, precision, rounds, peaks)


def time_model(name: str, device: str, precision: str, rounds: int, peaks: Peaks) -> Timing:
    """Time the rounds of one model."""
    federation = federation_for(name, device, precision)
    after, _ = federation.run_round(federation.initial_snapshot())
    (whole,) = median_seconds(device, rounds, round_runner(federation, after))
    select = client_seconds(federation, after, device, rounds)
    merge = server_seconds(federation, after, device, rounds)
    (evaluate,) = median_seconds(device, rounds, lambda: federation.engine.evaluate(after.state.w))
    flops, traffic = flops_and_bytes(name, federation)
    limit = max(flops / peaks.flops, traffic / peaks.bytes)
    train = max(0.0, whole - select - merge)
    return Timing(
        name, work_for(name).text, federation.task.layout.d, device, precision, whole, train,
        select, merge, evaluate, flops, traffic, limit,
    )  # fmt: skip


def federation_for(name: str, device: str, precision: str) -> Federation:
    """Return a federation on random samples, which take as long as real ones."""
    draw, work = torch.Generator().manual_seed(0), work_for(name)
    clients = [random_samples(name, 10 * work.batch, draw) for _ in range(CLIENTS)]
    return prepare(
        model_for(name, device, precision),
        clients,
        random_samples(name, work.tested, draw),
        fedadam_ssm(local_steps=work.steps),
        Options(
            batch_size=work.batch,
            participation=1.0,
            dropout=0.0,
            min_clients=0,
            wire="count",
            loss=loss_for(name, clients[0][1]),
            seed=0,
            device=device,
            precision=precision,
        ),
    )


def round_runner(federation: Federation, snapshot: Snapshot) -> Callable[[], None]:
    """Return a function that runs the next round at each call."""

    def run_next_round() -> None:
        nonlocal snapshot
        snapshot, _ = federation.run_round(snapshot)

    return run_next_round


def client_seconds(federation: Federation, snapshot: Snapshot, device: str, rounds: int) -> float:
    """Time the clients' work after their last step: select coordinates and count the bytes.

    A GPU does it for all clients at once, a CPU client by client in several processes. On a GPU
    this work is queued while the local steps run, so its time is the delay that it adds.
    """
    layout, d = federation.task.layout, federation.task.layout.d
    stacked = CLIENTS if device == "cuda" else 1
    phase, clients = federation.algorithm.phase(2), tuple(range(stacked))
    start = snapshot.state.map(lambda x: x.expand(stacked, -1))
    noise = torch.randn(stacked, d, generator=torch.Generator().manual_seed(0)).to(start.w)
    moved = (x + 1e-3 * noise.roll(n, -1) for n, x in enumerate(start))
    end = State.of(start.names, moved)
    specs = [Spec(layout, federation.algorithm.name, 2, n) for n in clients]

    def send() -> None:
        parts, _ = phase.send(Context(layout, 2, 0, clients), LocalUpdate(start, end), {})
        encoded_sizes(Update(parts, (1.0,) * stacked), specs)

    if device == "cuda":
        train = long_work(device)

        def train_and_send() -> None:
            train()
            send()

        train_only, train_then_send = median_seconds(device, rounds, train, train_and_send)
        return max(0.0, train_then_send - train_only)
    processes = getattr(federation.engine, "processes", 1)
    return median_seconds(device, rounds, send)[0] * CLIENTS / stacked / processes


def long_work(device: str) -> Callable[[], None]:
    """Return a function that keeps the device busy for some milliseconds, but not the host."""
    a = torch.randn(LONG_SIDE, LONG_SIDE, device=device)
    out = torch.empty_like(a)

    def multiply() -> None:
        for _ in range(LONG_TIMES):
            torch.mm(a, a, out=out)

    return multiply


def server_seconds(federation: Federation, snapshot: Snapshot, device: str, rounds: int) -> float:
    """Time the server's work: check, add and merge the updates, broadcast and apply."""
    job = federation.job_after(snapshot)
    results = list(federation.engine.train(job))

    def serve() -> None:
        inbox = federation.open_inbox(job, snapshot)
        inbox.take_in_order(iter(results))
        federation.broadcast(replace(snapshot, round=job.round), job.phase, inbox)

    return median_seconds(device, rounds, serve)[0]


def median_seconds(device: str, times: int, *works: Callable[[], object]) -> list[float]:
    """Return the median seconds of each function, calling them alternately."""
    seconds: list[list[float]] = [[] for _ in works]
    for _ in range(times):
        for work, taken in zip(works, seconds, strict=True):
            taken.append(seconds_of(work, device))
    return [median(taken) for taken in seconds]


def seconds_of(work: Callable[[], object], device: str) -> float:
    """Return the seconds of a call, including queued GPU work."""
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: str) -> None:
    """Wait until the device has finished all queued work."""
    if device == "cuda":
        torch.cuda.synchronize()


def flops_and_bytes(name: str, federation: Federation) -> tuple[float, float]:
    """Return the floating-point operations of a round, and the bytes its optimizer moves."""
    work = work_for(name)
    sample = first_samples(federation.task.clients[0], 1)[0].cpu()
    flops = CLIENTS * work.steps * work.batch * flops_of(model_for(name), sample)
    layout = federation.task.layout
    traffic = CLIENTS * work.steps * ADAM_TRAFFIC * layout.d * layout.dtype.itemsize
    return float(flops), float(traffic)


def flops_of(model: nn.Module, x: Tensor) -> int:
    """Count the floating-point operations of a forward and a backward pass.

    >>> flops_of(nn.Linear(3, 2), torch.zeros(1, 3))
    24
    """
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    return int(counter.get_total_flops())


def measure_peaks(device: str, precision: str) -> Peaks:
    """Measure the peak speeds with large matrix products and copies."""
    on_gpu = device == "cuda"
    side, length = (8192, 2**28) if on_gpu else (2048, 2**25)
    a = torch.randn(side, side, device=device, dtype=DTYPES[precision])
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    product = min(seconds_of(lambda: a @ a, device) for _ in range(8))
    torch.backends.cuda.matmul.allow_tf32 = before
    source = torch.zeros(length, device=device)
    target = torch.zeros_like(source)
    copied = min(seconds_of(lambda: target.copy_(source), device) for _ in range(8))
    return Peaks(2 * side**3 / product, 2 * source.nbytes / copied)

"""Every engine trains what the reference engine trains."""

import gc
import os
import signal
import time
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from fedsift import algorithms
from fedsift.adam import AdamStep
from fedsift.engine import Forked, Reference, Stacked
from fedsift.engine.contract import Job
from fedsift.engine.gpu.gradients import SingleGradients, VmapGradients
from fedsift.engine.gpu.stacked_task import StackedTask
from fedsift.engine.gpu.unsupported import UnsupportedModel
from fedsift.engine.processes import forked, pool, worker
from fedsift.errors import Diverged, WorkerDied
from fedsift.models.transformer import Attention
from fedsift.simulation import Options, prepare
from fedsift.task import Task
from fedsift.vector import Layout
from fork_server import ForkedPython
from problems import ridge

CUDA = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def always_parallel(monkeypatch):
    monkeypatch.setattr(forked, "MIN_PARALLEL_SECONDS", -1.0)


def images(clients=5, size=12):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(clients, size, 1, 8, 8, generator=draw)
    y = torch.randint(0, 4, (clients, size), generator=draw)
    return list(zip(x, y, strict=True))


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(),
        nn.Linear(36, 4),
    )  # fmt: skip


def federation(name="fedadam-ssm", processes=2, **options):
    known = algorithms.settings_of(name)
    wanted = {"density": 0.2, "local_steps": 3, "lr": 0.01, "clip": 0.5}
    method = algorithms.find(name)(**{k: v for k, v in wanted.items() if k in known})
    test = torch.randn(2500, 1, 8, 8), torch.randint(0, 4, (2500,))
    options = {"participation": 0.8, "dropout": 0.2, "min_clients": 0, "wire": "count", **options}
    made = prepare(
        network(), images(), test, method, Options(batch_size=8, loss=cross_entropy, seed=0,
        device="cpu", **options),
    )  # fmt: skip
    return replace(made, engine=Forked(made.task, method, processes))


def rounds(fed, count=3):
    snapshot, happened = fed.initial_snapshot(), []
    for _ in range(count):
        snapshot, record = fed.run_round(snapshot)
        happened.append((record, snapshot.traffic, fed.engine.evaluate(snapshot.state.w)))
    return snapshot, happened


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize(
    "name", ["fedadam-ssm", "fedadam-top", "efficient-adam", "onebit-adam", "compressed-fedadam"]
)
def test_parallel_results_are_bit_identical_to_the_reference(name, processes):
    parallel = federation(name, processes)
    serial = replace(parallel, engine=Reference(parallel.task))
    ours, happened = rounds(parallel)
    theirs, expected = rounds(serial)
    assert happened == expected
    for one, other in zip(ours.state, theirs.state, strict=True):
        assert torch.equal(one, other)
    assert ours.client_memory.keys() == theirs.client_memory.keys()
    for n, memory in theirs.client_memory.items():
        for key, x in memory.items():
            assert torch.equal(ours.client_memory[n][key], x)
    if parallel.engine.processes > 1:  # next to a GPU, a process that trained cannot be forked
        assert len(parallel.engine.pool.processes) == processes


def test_steps_of_earlier_rounds_are_not_kept():
    fed = federation(participation=1.0, dropout=0.0)

    def phase(round):  # a schedule makes a step of its own for every round
        step = AdamStep(lr=0.1 / round, beta1=0.9, beta2=0.999, eps=1e-6)
        return replace(fed.algorithm.phase(round), step=step)

    engine = Stacked(fed.task, fed.algorithm)
    rounds(replace(fed, algorithm=replace(fed.algorithm, phase=phase), engine=engine))
    assert len(engine.steps) == 1


@pytest.mark.parametrize("threads", [1, 2])
def test_the_result_does_not_depend_on_torchs_threads(threads):
    torch.set_num_threads(threads)
    try:
        snapshot, _ = rounds(federation(processes=1), 2)
    finally:
        torch.set_num_threads(1)
    expected, _ = rounds(federation(processes=2), 2)
    assert torch.equal(snapshot.state.w, expected.state.w)


def test_small_work_starts_no_workers(monkeypatch):
    monkeypatch.setattr(forked, "MIN_PARALLEL_SECONDS", 60.0)
    fed = federation()
    rounds(fed, 1)
    assert fed.engine.pool is None


def test_divergence_in_a_worker_is_reported_and_the_engine_stays_usable():
    fed = federation(participation=1.0, dropout=0.0)
    before, _ = fed.run_round(fed.initial_snapshot())
    broken = before.state.replace(w=torch.full_like(before.state.w, float("nan")))
    with pytest.raises(Diverged, match="client 0"):
        fed.run_round(replace(before, state=broken))
    again, _ = fed.run_round(before)
    expected, _ = replace(fed, engine=Reference(fed.task)).run_round(before)
    assert torch.equal(again.state.w, expected.state.w)


@pytest.mark.skipif(CUDA, reason="next to a GPU, a process that trained cannot be forked")
def test_an_exception_in_a_worker_is_reported_with_its_traceback():
    fed = federation(participation=1.0)
    fed.run_round(fed.initial_snapshot())

    def unwilling(output, labels):
        raise ZeroDivisionError("the loss is unwilling")

    fed = replace(fed, engine=Forked(replace(fed.task, loss=unwilling), fed.algorithm, 2))
    fed.engine.start_pool()
    with pytest.raises(RuntimeError, match="the loss is unwilling"):
        fed.run_round(fed.initial_snapshot())


@pytest.mark.skipif(CUDA, reason="next to a GPU, a process that trained cannot be forked")
def test_a_killed_worker_is_reported_in_one_line():
    fed = federation(participation=1.0)
    before, _ = fed.run_round(fed.initial_snapshot())
    for child in active_children():
        os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"worker process [0-9]+ was killed"):
        fed.run_round(before)


@pytest.mark.skipif(CUDA, reason="next to a GPU, a process that trained cannot be forked")
def test_a_worker_that_died_between_rounds_is_reported_and_the_pool_is_restarted():
    fed = federation(participation=1.0, dropout=0.0)
    before, _ = fed.run_round(fed.initial_snapshot())
    child = next(iter(fed.engine.pool.processes.values()))
    child.kill()
    child.join()  # the other end of its pipe is closed now
    with pytest.raises(WorkerDied, match=r"worker process [0-9]+ was killed"):
        fed.engine.evaluate(before.state.w)
    again, _ = fed.run_round(before)
    assert fed.engine.idle_pool()
    expected, _ = replace(fed, engine=Reference(fed.task)).run_round(before)
    assert torch.equal(again.state.w, expected.state.w)


@pytest.mark.skipif(CUDA, reason="next to a GPU, a process that trained cannot be forked")
@pytest.mark.parametrize("when", ["before", "during"])
def test_a_stopped_worker_is_reported_in_one_line(when, monkeypatch):
    monkeypatch.setattr(pool, "CHECK_SECONDS", 0.1)
    monkeypatch.setattr(pool, "STOPPED_SECONDS", 0.3)

    def slow(output, labels):
        time.sleep(0.05)  # so that the worker is still at work when it is stopped
        return cross_entropy(output, labels)

    fed = federation(participation=1.0, dropout=0.0)
    fed = replace(fed, engine=Forked(replace(fed.task, loss=slow), fed.algorithm, 2))
    start = fed.initial_snapshot()
    fed.engine.start_pool()
    process = next(iter(fed.engine.pool.processes.values()))
    memory = {n: {} for n in range(5)}
    job = Job(1, fed.algorithm.phase(1), start.state, (0, 1, 2, 3, 4), memory, "batch")
    results = fed.engine.train(job)
    if when == "during":
        next(results)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(WorkerDied, match=f"worker process {process.pid} is stopped"):
            list(results)
        assert not process.is_alive()
    finally:
        process.kill()


@pytest.mark.skipif(CUDA, reason="next to a GPU, a process that trained cannot be forked")
def test_a_worker_that_seems_stuck_is_named_in_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(pool, "CHECK_SECONDS", 0.05)
    monkeypatch.setattr(pool, "SILENT_SECONDS", 0.1)

    def stuck(output, labels):
        time.sleep(0.2)
        return cross_entropy(output, labels)

    fed = federation(participation=1.0, dropout=0.0)
    fed = replace(fed, engine=Forked(replace(fed.task, loss=stuck), fed.algorithm, 2))
    start = fed.initial_snapshot()
    fed.engine.start_pool()
    process = next(iter(fed.engine.pool.processes.values()))
    job = Job(1, fed.algorithm.phase(1), start.state, (0,), {0: {}}, "batch")
    assert len(list(fed.engine.train(job))) == 1
    assert f"no reply from worker process {process.pid} for 0 s" in caplog.text


@pytest.mark.skipif(CUDA, reason="next to a GPU, a process that trained cannot be forked")
def test_a_stopped_worker_does_not_outlive_its_pool():
    fed = federation(participation=1.0, dropout=0.0)
    fed.engine.start_pool()
    process = next(iter(fed.engine.pool.processes.values()))
    try:
        os.kill(process.pid, signal.SIGSTOP)
        while not pool.is_stopped(process.pid):
            time.sleep(0.01)
        del fed
        gc.collect()
        process.join(timeout=10)
        assert process.exitcode == -signal.SIGKILL
    finally:
        process.kill()


@pytest.mark.skipif(CUDA, reason="next to a GPU, a process that trained cannot be forked")
@pytest.mark.parametrize(
    "problem",
    [
        MemoryError("72 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 72 GiB"),
    ],
    ids=["numpy", "torch"],
)
def test_a_worker_without_memory_is_reported_in_one_line(problem):
    def too_large(output, labels):
        raise problem

    fed = federation(participation=1.0)
    fed = replace(fed, engine=Forked(replace(fed.task, loss=too_large), fed.algorithm, 2))
    fed.engine.start_pool()
    with pytest.raises(WorkerDied, match=r"a worker process ran out of memory: .*72 GiB$"):
        fed.run_round(fed.initial_snapshot())


def test_other_ends_of_a_worker_are_described():
    class Ended:
        pid, exitcode = 7, -signal.SIGSEGV

        def join(self, timeout):
            pass

    assert pool.death_message(Ended()) == "worker process 7 was ended by SIGSEGV"
    Ended.exitcode = 3
    assert pool.death_message(Ended()) == "worker process 7 ended unexpectedly with exit code 3"


@pytest.mark.skipif(CUDA, reason="next to a GPU, a process that trained cannot be forked")
def test_an_abandoned_round_does_not_disturb_the_next():
    fed = federation(participation=1.0, dropout=0.0)
    start = fed.initial_snapshot()
    fed.engine.start_pool()
    memory = {n: {} for n in range(5)}
    job = Job(1, fed.algorithm.phase(1), start.state, (4, 3, 2, 1, 0), memory, "batch")
    left = fed.engine.train(job)
    next(left)  # the other results are never read
    ours, _ = fed.run_round(start)
    theirs, _ = replace(fed, engine=Reference(fed.task)).run_round(start)
    assert torch.equal(ours.state.w, theirs.state.w)
    left.close()
    assert fed.engine.idle_pool()


@pytest.mark.skipif(CUDA, reason="next to a GPU, a process that trained cannot be forked")
def test_ctrl_c_does_not_wait_for_clients_that_train(tmp_path):
    (tmp_path / "wait").touch()
    here = Path(__file__).parents[1]
    process = ForkedPython(str(here / "interrupted.py"), str(tmp_path))
    try:
        while len(begun := list(tmp_path.glob("*.pid"))) < 2:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        while process.printed() != "interrupted\n":
            assert time.monotonic() - began < 2
            time.sleep(0.01)
        assert process.communicate(timeout=60)[0] == "interrupted\nthe same\n"
    finally:
        process.kill()
        process.wait()
    assert not [path for path in begun if Path(f"/proc/{path.stem}").exists()]


@pytest.mark.skipif(CUDA, reason="next to a GPU, a process that trained cannot be forked")
def test_processes_end_with_their_engine():
    fed = federation()
    already = set(active_children())
    rounds(fed, 1)
    mine = set(active_children()) - already
    assert len(mine) == 2
    del fed
    deadline = time.monotonic() + 10
    while any(child.is_alive() for child in mine) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(child.is_alive() for child in mine)


def test_regression_without_a_test_set():
    problem = ridge(0)
    made = prepare(
        problem.model, problem.clients, None, algorithms.fedsgd(2), Options(batch_size=None,
        loss=mse_loss, seed=0, device="cpu", participation=1.0, dropout=0.0, min_clients=0,
        wire="real"),
    )  # fmt: skip
    fed = replace(made, engine=Forked(made.task, made.algorithm, 2))
    ours, happened = rounds(fed, 2)
    theirs, _ = rounds(replace(fed, engine=Reference(fed.task)), 2)
    assert torch.equal(ours.state.w, theirs.state.w)
    assert happened[-1][-1] == (None, None)


@pytest.mark.parametrize("most", [100, 2])
@pytest.mark.parametrize("name", [*algorithms.METHODS, "compressed-fedsgd", "compressed-fedadam"])
def test_stacked_clients_train_like_single_ones(name, most, monkeypatch):
    monkeypatch.setattr(Stacked, "_max_clients", lambda self, batch: most)
    fed = federation(name)
    plain = nn.Sequential(*(layer for layer in network() if not isinstance(layer, nn.Dropout)))
    layout = replace(Layout.of(plain), sample_shapes=fed.task.layout.sample_shapes)
    layout = fed.algorithm.layout_for(layout)
    task = replace(fed.task, model=plain, layout=layout)
    serial = replace(fed, task=task, engine=Reference(task))
    stacked = replace(fed, task=task, engine=Stacked(task, fed.algorithm))
    ours, happened = rounds(stacked)
    theirs, expected = rounds(serial)
    for one, other in zip(ours.state, theirs.state, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    for (_, traffic, _), (_, counted, _) in zip(happened, expected, strict=True):
        assert traffic.uplink_bits_paper == counted.uplink_bits_paper
        assert traffic.uplink_bytes == pytest.approx(counted.uplink_bytes, rel=0.02)


MODELS = {
    "a perceptron": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), True),
    "attention": (
        lambda: nn.Sequential(
            nn.Flatten(1, 2), Attention(8, 2), nn.LayerNorm(8), nn.Flatten(), nn.Linear(64, 4)
        ),
        True,
    ),
    "convolutions": (lambda: nn.Sequential(nn.Conv2d(1, 4, 8), nn.Flatten()), False),
    "something random": (
        lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 4)), False,
    ),
    "a look at the data": (lambda: Curious(nn.Flatten(), nn.Linear(64, 4)), False),
}  # fmt: skip


class Curious(nn.Sequential):
    def forward(self, x):
        return super().forward(x if x.sum() > 0 else -x)


@pytest.mark.parametrize("name", MODELS)
def test_operations_are_batched_over_clients_where_they_can_be(name):
    make, can = MODELS[name]
    torch.manual_seed(0)
    model = make()
    layout = type(federation().task.layout).of(model)
    x, y = (torch.cat(each) for each in zip(*images(), strict=True))
    task = Task(model, cross_entropy, [(x, y)], None, 8, 0, layout)
    task = StackedTask(task, x, y, "fp32")
    rows = torch.arange(24).view(3, 8)
    if not can:
        with pytest.raises((UnsupportedModel, RuntimeError)):
            VmapGradients(task, 3).compute(rows)
        return
    start = torch.stack([scale * layout.read(model) for scale in (1.0, 1.5, 2.0)])
    ways = VmapGradients(task, 3), SingleGradients(task, 3)
    for gradients in ways:
        gradients.pack(start, gradients.buffers.x.w)
        gradients.compute(rows)
    ours, theirs = (gradients.buffers for gradients in ways)
    torch.testing.assert_close(ours.gradient, theirs.gradient, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours.loss, theirs.loss)


def test_clients_of_different_batch_sizes_are_stacked_separately():
    fed = federation()
    short = [(x[:3], y[:3]) if n % 2 else (x, y) for n, (x, y) in enumerate(images())]
    engine = Stacked(replace(fed.task, clients=short), fed.algorithm)
    assert list(engine.stacks((0, 1, 2, 3, 4))) == [(0, 2, 4), (1, 3)]


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="fp32, tf32, bf16"):
        federation(precision="fp8")


def test_a_stack_with_random_layers_follows_the_seed_alone():
    fed = federation()
    engine = Stacked(fed.task, fed.algorithm)
    fed = replace(fed, engine=engine)
    once, _ = fed.run_round(fed.initial_snapshot())
    torch.rand(7)
    again, _ = fed.run_round(fed.initial_snapshot())
    assert torch.equal(once.state.w, again.state.w)


def test_a_parameter_that_is_not_used_has_no_gradient():
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(64, 4), nn.Linear(3, 3)

        def forward(self, x):
            return self.used(x.flatten(1))

    fed = federation()
    torch.manual_seed(0)
    task = replace(fed.task, model=Partly())
    task = replace(task, layout=type(task.layout).of(task.model))
    for engine in (Stacked(task, fed.algorithm), Reference(task)):
        after, _ = replace(fed, task=task, engine=engine).run_round(
            replace(fed, task=task, engine=engine).initial_snapshot()
        )
        assert not bool(after.state.m[-12:].any())


def test_a_result_is_yielded_before_the_next_stack_trains(monkeypatch):
    monkeypatch.setattr(Stacked, "_max_clients", lambda self, batch: 1)
    fed = federation(participation=1.0)
    engine = Stacked(fed.task, fed.algorithm)
    trained = []
    train = engine._train_stack
    monkeypatch.setattr(engine, "_train_stack", lambda j, c: (trained.append(c), train(j, c))[1])
    start = fed.initial_snapshot()
    job = Job(1, fed.algorithm.phase(1), start.state, (0, 1, 2), {n: {} for n in range(3)}, "batch")
    next(engine.train(job))
    assert trained == [(0,)]


@pytest.mark.parametrize("labels", [torch.zeros(10, 3, dtype=torch.long), torch.zeros(10)])
def test_accuracy_is_reported_for_class_labels_only(labels):
    fed = federation()
    task = replace(fed.task, test=(torch.zeros(10, 1, 8, 8), labels), loss=lambda a, b: a.sum())
    accuracy, loss = Reference(task).evaluate(fed.initial_snapshot().state.w)
    assert accuracy is None
    assert loss is not None


def test_without_working_autograd_in_forks_all_work_stays_in_one_process(monkeypatch):
    monkeypatch.setattr(worker, "can_train", lambda: False)
    fed = federation()
    ours, _ = rounds(fed, 2)
    theirs, _ = rounds(replace(fed, engine=Reference(fed.task)), 2)
    assert fed.engine.pool is None
    assert torch.equal(ours.state.w, theirs.state.w)


@pytest.mark.skipif(CUDA, reason="next to a GPU, a process that trained cannot be forked")
def test_next_to_a_gpu_processes_are_forked_before_training(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    fed = federation(participation=1.0)
    monkeypatch.setattr(fed.engine.reference, "train", lambda job: pytest.fail("trained here"))
    fed.run_round(fed.initial_snapshot())
    assert len(fed.engine.pool.processes) == 2


def test_a_method_may_store_its_gradients():
    fed = federation(participation=1.0, dropout=0.0)
    kept = []

    def step(x, gradient, context):
        kept.append(gradient)
        return x.replace(w=x.w - 0.1 * gradient)

    phase = replace(fed.algorithm.phase(1), step=step)
    start = fed.initial_snapshot().state
    list(Reference(fed.task).train(Job(1, phase, start, (0,), {0: {}}, "batch")))
    assert len({float(gradient.sum()) for gradient in kept}) == phase.local_steps

"""The clients' weights in the mean: one rule, on every engine and in what frames may say."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import mse_loss

import fedsift
from fedsift import algorithms
from fedsift.codec.errors import FrameError
from fedsift.codec.frame import Spec, encode
from fedsift.codec.update import Update, dense
from fedsift.engine import Forked, Reference, Stacked
from fedsift.engine.contract import Received
from fedsift.engine.processes import forked
from fedsift.errors import ConfigError
from fedsift.federation.round import Federation
from fedsift.runs.config import RunConfig
from fedsift.task import WEIGHTS, Task
from fedsift.vector import Layout
from problems import ridge

BATCH, MAX_SAMPLES = 8, 100
RULES = {"batch": lambda n: min(n, BATCH), "examples": lambda n: n, "equal": lambda n: 1}
METHOD = algorithms.fedsgd(local_steps=1, lr=0.01)
PROBLEM = ridge(3, clients=4)


def federation(weights, algorithm=METHOD, engine=Reference, **options):
    model = PROBLEM.model
    task = Task(model, mse_loss, PROBLEM.clients, None, BATCH, 0, Layout.of(model))
    engine = Reference(task) if engine is Reference else engine(task, algorithm)
    return Federation(task, algorithm, engine, weights=weights, **options)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("engine", [Reference, Forked, Stacked])
def test_every_engine_weighs_clients_by_the_rule(weights, engine, monkeypatch):
    monkeypatch.setattr(forked, "MIN_PARALLEL_SECONDS", -1.0)
    merged = []
    fed = federation(weights, engine=engine, on_upload=lambda *_: merged.append(_[1]))
    fed.run_round(fed.initial_snapshot())
    found = [weight for update in merged for weight in update.weights]
    sizes = [len(x) for x, _ in PROBLEM.clients]
    assert sorted(found) == sorted(RULES[weights](n) for n in sizes)
    assert min(sizes) < BATCH < max(sizes)


def test_the_mean_has_the_weights():
    fed = federation("examples")
    state = fed.run_round(fed.initial_snapshot())[0].state
    ends = [r.update.parts[0].values["w"].restore()[0] for r in fed.engine.train(job_of(fed))]
    mean = np.average(torch.stack(ends).numpy(), axis=0, weights=PROBLEM.sizes)
    np.testing.assert_allclose(state.w - PROBLEM.w0, mean, rtol=1e-12)


def job_of(fed):
    return fed.job_after(fed.initial_snapshot())


def test_the_default_is_the_methods_own():
    equal = replace(METHOD, weights="equal")
    assert [federation(None, m).weighting for m in (METHOD, equal)] == ["batch", "equal"]
    assert federation("examples", equal).weighting == "examples"


@pytest.mark.parametrize(
    ("weights", "sent", "is_refused"),
    [
        ("batch", BATCH, False), ("batch", BATCH + 1, True), ("batch", 0.5, True),
        ("examples", MAX_SAMPLES, False), ("examples", MAX_SAMPLES + 1, True),
        ("equal", 1, False), ("equal", 2, True), ("equal", 0.5, True), ("equal", 1.5, True),
    ],
)  # fmt: skip
def test_a_frame_with_more_weight_than_the_rule_permits_is_refused(weights, sent, is_refused):
    fed = federation(weights, max_samples=MAX_SAMPLES)
    layout, job = fed.task.layout, job_of(fed)
    update = Update(dense({"w": torch.zeros(1, layout.d).double()}), (float(sent),))
    frame = encode(update, Spec(layout, METHOD.name, 1, 0, fed.run_id, bytes(8)))
    limits = fed.upload_limits(job, bytes(8))
    if is_refused:
        with pytest.raises(FrameError, match=f"weight {float(sent)} is outside"):
            fed.decode_upload(Received(0, frame, b"", 0.0), limits)
    else:
        assert fed.decode_upload(Received(0, frame, b"", 0.0), limits).weights == (sent,)


def test_another_rule_is_another_run():
    assert len({federation(weights).run_id for weights in WEIGHTS}) == 3


def test_a_configuration_records_the_rule():
    assert RunConfig.from_values({"algorithm": "fedsgd"}).weights == "batch"
    assert RunConfig.from_values({"weights": "equal"}).flat()["weights"] == "equal"
    with pytest.raises(ConfigError, match="unknown weights 'exampels'; did you mean 'examples'"):
        RunConfig.from_values({"weights": "exampels"})


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="weights must be batch, examples or equal"):
        fedsift.simulate(PROBLEM.model, PROBLEM.clients, weights="size", loss=mse_loss)

"""FedAvg and FedOpt against Flower's own classes, on the same client updates.

Flower's FedAvg is `fedavg`. Flower's FedAdam, FedYogi and FedAdagrad are `fedopt` with two changes:
v starts at 0 instead of tau^2, and FedAdam multiplies the step of round t by
sqrt(1 - beta2^(t+1)) / (1 - beta1^(t+1)). Flower's FedYogi and FedAdagrad correct nothing, and its
FedAdagrad has no momentum.

A `Server` is what is compared: a function of the round, the weights it sent, the clients' weights
after training and their numbers of examples, that returns the next global weights.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedYogi
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor

from fedsift import algorithms
from fedsift.algorithms import Algorithm, Context
from fedsift.codec.update import Update, WeightedSum, dense
from fedsift.federation.round import apply_broadcast
from fedsift.task import weight_of
from fedsift.vector import Layout, State
from oracle import Vector, weighted_mean
from oracles.fedavg import fedavg
from oracles.fedopt import ServerState, server_step

Server: TypeAlias = Callable[[int, Vector, Sequence[Vector], Sequence[int]], Vector]
StepSize: TypeAlias = Callable[[int], float]  # of the round

D, CLIENTS, ROUNDS = 7, 5, 10
LR, BETA1, BETA2, TAU = 0.05, 0.9, 0.99, 1e-3
FLOWER = {"adam": FedAdam, "yogi": FedYogi, "adagrad": FedAdagrad}


@pytest.fixture(autouse=True)
def _identity(monkeypatch):
    """A message says which run, node and task it is from."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


# Flower's servers


class Nodes:
    """A grid of which a strategy asks only who is there."""

    def get_node_ids(self):
        return list(range(1, CLIENTS + 1))


def record(weights: Vector) -> ArrayRecord:
    """Two tensors, because Flower works tensor by tensor."""
    return ArrayRecord({"a": Array(weights[:3].reshape(1, 3)), "b": Array(weights[3:])})


def weights_of(arrays: ArrayRecord) -> Vector:
    return np.concatenate([array.numpy().ravel() for array in arrays.values()])


def flower(strategy: FedAvg) -> Server:
    """The strategy between two messages: it configures a round and aggregates its replies."""

    def server(t: int, sent: Vector, trained: Sequence[Vector], examples: Sequence[int]) -> Vector:
        messages = strategy.configure_train(t, record(sent), ConfigRecord(), Nodes())
        replies = [
            Message(
                RecordDict({"arrays": record(w), "metrics": MetricRecord({"num-examples": n})}),
                reply_to=message,
            )
            for message, w, n in zip(messages, trained, examples, strict=False)
        ]
        arrays, _ = strategy.aggregate_train(t, replies)
        assert arrays is not None
        return weights_of(arrays)

    return server


def flowers_fedopt(server: str) -> Server:
    betas = {} if server == "adagrad" else {"beta_1": BETA1, "beta_2": BETA2}
    return flower(FLOWER[server](eta=LR, tau=TAU, **betas))


# Our servers


def oracles_fedavg() -> Server:
    def server(t: int, sent: Vector, trained: Sequence[Vector], examples: Sequence[int]) -> Vector:
        """One step of SGD with this gradient takes client n from `sent` to `trained[n]`."""
        gradients = [lambda w, end=end: sent - end for end in trained]
        everyone = [range(len(trained))]
        steps = [1] * len(trained)
        return fedavg(gradients, examples, sent, everyone, local_steps=steps, lr=1.0)

    return server


def oracles_fedopt(server: str, *, server_lr: StepSize, beta1: float, first_v: float) -> Server:
    state = ServerState(np.zeros(D), np.zeros(D), np.full(D, first_v))

    def step(t: int, sent: Vector, trained: Sequence[Vector], examples: Sequence[int]) -> Vector:
        nonlocal state
        state = server_step(
            ServerState(sent, state.m, state.v),
            weighted_mean([w - sent for w in trained], examples),
            server=server, server_lr=server_lr(t), beta1=beta1, beta2=BETA2, tau=TAU,
        )  # fmt: skip
        return state.W

    return step


def real(algorithm: Algorithm, memory: dict[str, Tensor]) -> Server:
    """The server of a method of fedsift, which has the given memory before round 1."""
    layout = Layout(("w",), ((D,),), torch.float64)

    def server(t: int, sent: Vector, trained: Sequence[Vector], examples: Sequence[int]) -> Vector:
        nonlocal memory
        state, context = State(w=torch.from_numpy(sent)), Context(layout, t, 0, ())
        total = WeightedSum(algorithm.zero_update(layout, state.w))
        for w, n in zip(trained, examples, strict=True):
            weight = float(weight_of(algorithm.weights, samples=n, batch=1))
            total.add(Update(dense({"w": torch.from_numpy(w - sent)[None]}), (weight,)))
        parts, memory = algorithm.phase(t).broadcast(context, total.mean(), memory)
        return apply_broadcast(algorithm, context, state, parts)[0].w.numpy()

    return server


def real_fedopt(server: str, *, server_lr: StepSize, beta1: float, first_v: float) -> Server:
    algorithm = algorithms.fedopt(server, server_lr, beta1=beta1, beta2=BETA2, tau=TAU)
    layout = Layout(("w",), ((D,),), torch.float64)
    memory = algorithm.initial_server_memory(layout, torch.zeros(D).double())
    assert float(memory["v"][0, 0]) == TAU**2
    return real(algorithm, {**memory, "v": torch.full((1, D), first_v).double()})


# The two changes, and the comparison


def flowers_step_size(server: str) -> StepSize:
    """Flower's FedAdam corrects the bias of both moments, one power late; the others do not."""

    def corrected(t: int) -> float:
        return LR * np.sqrt(1 - BETA2 ** (t + 1)) / (1 - BETA1 ** (t + 1))

    return corrected if server == "adam" else lambda t: LR


def beta1_of(server: str) -> float:
    return 0.0 if server == "adagrad" else BETA1


def assert_same_weights(ours: Server, theirs: Server, tolerance: float = 1e-6) -> None:
    """Run both servers for some rounds on the same client updates, each on its own weights."""
    ours_end, theirs_end = trajectories(ours), trajectories(theirs)
    np.testing.assert_allclose(ours_end, theirs_end, rtol=tolerance, atol=tolerance)


def trajectories(server: Server) -> list[Vector]:
    """The weights after each round. Clients train a little, each in its own way and size."""
    draw = np.random.default_rng(0)
    w, found = draw.normal(size=D), []
    for t in range(1, ROUNDS + 1):
        size = int(draw.integers(2, CLIENTS + 1))  # who answers differs from round to round
        trained = [w + draw.normal(size=D) * 10.0 ** draw.integers(-4, 0) for _ in range(size)]
        w = server(t, w, trained, draw.integers(1, 400, size=size).tolist())
        found.append(w)
    return found


def assert_is_flowers_fedavg(ours: Server) -> None:
    assert_same_weights(ours, flower(FedAvg()))


def assert_is_flowers_fedopt_with_two_changes(make: Callable[..., Server], server: str) -> None:
    """`make` builds a FedOpt server from its name, step size, beta1 and first v."""
    changed = make(server, server_lr=flowers_step_size(server), beta1=beta1_of(server), first_v=0.0)
    assert_same_weights(changed, flowers_fedopt(server))


FEDOPT = pytest.mark.parametrize("fedopt", [oracles_fedopt, real_fedopt])


@pytest.mark.parametrize("server", [oracles_fedavg(), real(algorithms.fedavg(), {})])
def test_fedavg_is_flowers(server):
    assert_is_flowers_fedavg(server)


@FEDOPT
@pytest.mark.parametrize("server", FLOWER)
def test_fedopt_with_two_changes_is_flowers(server, fedopt):
    assert_is_flowers_fedopt_with_two_changes(fedopt, server)


@FEDOPT
@pytest.mark.parametrize("server", FLOWER)
def test_the_first_v_makes_a_difference(server, fedopt):
    beta1, step_size = beta1_of(server), flowers_step_size(server)
    ours = fedopt(server, server_lr=step_size, beta1=beta1, first_v=TAU**2)
    with pytest.raises(AssertionError):
        assert_same_weights(ours, flowers_fedopt(server))


@FEDOPT
def test_the_correction_makes_a_difference_to_adam(fedopt):
    ours = fedopt("adam", server_lr=lambda t: LR, beta1=BETA1, first_v=0.0)
    with pytest.raises(AssertionError):
        assert_same_weights(ours, flowers_fedopt("adam"))

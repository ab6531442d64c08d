"""Tests of the strategy and the client in one process, without a network."""

import json
import math
import shutil
import sys
import time
from dataclasses import replace
from itertools import pairwise

import httpx
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from google.protobuf.message import DecodeError
from inline import InlineGrid, InlineNode
from safetensors.torch import load_file
from torch import nn

import fedsift
from fedsift import algorithms
from fedsift.adam import AdamStep, clipped
from fedsift.algorithms import METHODS, Algorithm, Method, find, settings_of
from fedsift.codec.frame import Spec, decode, encode
from fedsift.codec.header import read_header
from fedsift.codec.limits import Limits
from fedsift.codec.update import CodedValues, Update, dense
from fedsift.codec.values import Bit
from fedsift.engine.contract import Missing, Received
from fedsift.errors import ConfigError, TooFewClients
from fedsift.flower import FedSift, arrays_of, client_app, client_round, exchange, superlink
from fedsift.flower.arrays import vector_from_arrays
from fedsift.flower.client_round import deadline
from fedsift.flower.deployment import METADATA_BYTES, BroadcastWire
from fedsift.flower.early_results import EarlyResults
from fedsift.flower.protocol import MalformedReply, TrainReply, array_of_frame
from fedsift.flower.pull import RECORD_BYTES, check_sizes
from fedsift.flower.store import ClientState, ClientStore
from fedsift.runs import federation_of, rollback
from fedsift.runs.config import RunConfig
from fedsift.simulation import initial_snapshot, run_rounds
from fedsift.vector import Layout, State

CLIENTS, SEED = 5, 2
SSM = algorithms.fedadam_ssm(density=0.1, local_steps=2)
EFFICIENT = algorithms.efficient_adam(bits=4)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def load_data(partition, partitions):
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(partition))
    return x, x[:, :3].argmax(1)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(exchange, "POLL_SECONDS", 0.0)


@pytest.fixture
def place(tmp_path):
    """A federation in this process: its grid, its strategy and its folder."""
    return Place(tmp_path)


class Place:
    def __init__(self, path):
        self.path = path

    def grid(self, algorithm=SSM, clients=CLIENTS, model=make_model, **options):
        app = client_app(model, load_data, algorithm, state_dir=self.path / "state", **options)
        return InlineGrid(InlineNode(app, n, clients) for n in range(clients))

    def strategy(self, algorithm=SSM, clients=CLIENTS, **options):
        network = {"network": make_model(), "input_shape": (6,)} if algorithm.makes_samples else {}
        options = {"batch_size": 8, "seed": SEED, "wait": 0.1, **network, **options}
        return FedSift(algorithm, clients, self.path / "run", **options)

    def history(self):
        lines = (self.path / "run" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def start(strategy, grid, rounds, timeout=60.0, model=make_model, **options):
    return strategy.start(grid, arrays_of(model()), rounds, timeout, **options)


def simulated(algorithm, rounds, **options):
    clients = [load_data(n, CLIENTS) for n in range(CLIENTS)]
    options = {"batch_size": 8, "seed": SEED, **options}
    return fedsift.simulate(make_model(), clients, algorithm=algorithm, rounds=rounds, **options)


def assert_same_bits(state, other):
    assert all(torch.equal(x, y) for x, y in zip(state, other, strict=True))


@pytest.mark.parametrize("name", [*METHODS, "compressed-fedadam"])
def test_every_method_gives_the_same_bits_as_a_simulation(name, place):
    few = {"local_steps": 2, "density": 0.1, "warmup_rounds": 2, "sample_steps": 3}
    algorithm = find(name)(**{k: v for k, v in few.items() if k in settings_of(name)})
    strategy = place.strategy(algorithm, participation=0.6)
    start(strategy, place.grid(algorithm), 4)
    result = simulated(algorithm, 4, participation=0.6)
    assert_same_bits(strategy.run.snapshot.state, result.state)
    model = make_model()
    model.load_state_dict(load_file(strategy.run.folder.model_file))
    assert torch.equal(result.layout.read(model), result.weights)
    assert torch.equal(vector_from_arrays(strategy.run.result.arrays)[1], result.weights)
    assert [r["uplink_bytes"] for r in place.history()] == [
        pytest.approx(r["uplink_bytes"]) for r in result.history[1:]
    ]


def test_a_server_that_computes_gradients_needs_the_network(place):
    with pytest.raises(ValueError, match=r"pass network=model, input_shape=\(...\)"):
        FedSift(algorithms.e3sfc(), CLIENTS, place.path / "run")
    strategy = place.strategy(algorithms.e3sfc(), network=nn.Linear(6, 3))
    with pytest.raises(ValueError, match="network has other parameters than initial_arrays"):
        start(strategy, place.grid(algorithms.e3sfc()), 1)


def test_a_method_of_ones_own_that_needs_the_network_is_told_so(place):
    """It works in simulations, and on Flower with the network."""

    def broadcast(context, mean, memory):
        x, y = torch.ones(1, 6), torch.ones(1, dtype=torch.int64)
        return dense({"w": mean.w - 0.1 * context.gradient(context.state.w, x, y)[None]}), memory

    phase = replace(algorithms.fedavg(local_steps=2).phase(1), broadcast=broadcast)
    algorithm = replace(algorithms.fedavg(local_steps=2), phase=lambda round: phase)
    with pytest.raises(ValueError, match="pass network=model to FedSift"):
        start(place.strategy(algorithm), place.grid(algorithm), 1)
    shutil.rmtree(place.path / "run")
    strategy = place.strategy(algorithm, network=make_model())
    start(strategy, place.grid(algorithm), 2)
    assert_same_bits(strategy.run.snapshot.state, simulated(algorithm, 2).state)


def test_clients_whose_samples_have_another_shape_are_reported(place):
    algorithm = algorithms.e3sfc(sample_steps=1)
    network = nn.Sequential(nn.Flatten(), *make_model())
    strategy = place.strategy(algorithm, network=network, input_shape=(2, 3), min_clients=0)
    start(strategy, place.grid(algorithm, model=lambda: network), 1, model=lambda: network)
    problem = place.history()[0]["problems"]["0"]
    assert "another input_shape" in problem


def pruned():
    model = make_model()
    with torch.no_grad():
        model[0].weight.mul_(model[0].weight.abs() > 0.1)
    assert (model[0].weight.signbit() & (model[0].weight == 0)).any()
    return model


def frozen():
    model = make_model()
    model[0].weight.requires_grad_(False)
    return model


@pytest.mark.parametrize("model", [pruned, frozen])
def test_models_may_have_negative_zeros_or_frozen_parameters(place, model):
    strategy = place.strategy()
    start(strategy, place.grid(model=model), 2, model=model)
    clients = [load_data(n, CLIENTS) for n in range(CLIENTS)]
    result = fedsift.simulate(model(), clients, algorithm=SSM, rounds=2, batch_size=8, seed=SEED)
    assert_same_bits(strategy.run.snapshot.state, result.state)


def test_bfloat16_models_are_refused():
    with pytest.raises(ValueError, match="no bfloat16"):
        arrays_of(make_model().bfloat16())


def test_arrays_with_frozen_parameters_are_refused_with_advice(place):
    arrays = ArrayRecord(frozen().state_dict())
    with pytest.raises(TooFewClients, match=r"arrays_of\(model\)"):
        place.strategy().start(place.grid(model=frozen), arrays, 1, 60.0)


def test_demo_clients_train_like_a_simulation(place, monkeypatch):
    from fedsift.flower.demo import client

    monkeypatch.setenv("FLWR_HOME", str(place.path))
    words = {"clients": 3, "local_steps": 3, "algorithm": "fedadam", "model": "small-cnn"}
    config = RunConfig.from_values({**words, "dataset": "digits"})
    fed = federation_of(config)
    *_, (expected, _) = run_rounds(fed, initial_snapshot(fed), 2)
    app = client()
    nodes = [InlineNode(app, n, 3) for n in range(3)]
    grid = InlineGrid(nodes, run_config={**config.flat(), "out": "not used"})
    options = {"batch_size": config.batch_size, "seed": config.seed}
    strategy = place.strategy(config.make_algorithm(), 3, **options)
    strategy.start(grid, arrays_of(fed.task.model), 2, 60.0)
    assert_same_bits(strategy.run.snapshot.state, expected.state)


def test_start_returns_the_result_of_a_flower_strategy(place):
    def evaluate(round, arrays):
        return MetricRecord({"accuracy": 0.1 * round, "loss": 2.0})

    result = start(place.strategy(), place.grid(), 2, evaluate_fn=evaluate)
    model = make_model()
    model.load_state_dict(result.arrays.to_torch_state_dict())
    assert torch.equal(Layout.of(model).read(model), simulated(SSM, 2).state.w)
    assert [r["accuracy"] for r in place.history()] == [0.1, 0.2]
    assert result.train_metrics_clientapp[2]["clients"] == CLIENTS
    assert result.evaluate_metrics_serverapp[2]["accuracy"] == 0.2


def test_the_initial_model_is_evaluated_before_the_first_round_only(place):
    models = {}

    def evaluate(round, arrays):
        models[round] = vector_from_arrays(arrays)[1]
        return MetricRecord({"accuracy": 0.5})

    result = start(place.strategy(), place.grid(), 1, evaluate_fn=evaluate)
    assert torch.equal(models[0], Layout.of(make_model()).read(make_model()))
    assert result.evaluate_metrics_serverapp.keys() == {0, 1}
    assert [record["round"] for record in place.history()] == [1]
    result = start(place.strategy(), place.grid(), 2, evaluate_fn=evaluate)
    assert result.evaluate_metrics_serverapp.keys() == {1, 2}


def test_nodes_with_the_last_state_receive_a_delta_and_others_the_full_state(place):
    grid, strategy = place.grid(), place.strategy()
    start(strategy, grid, 2)
    grid.nodes[103].is_online = False
    start(place.strategy(), grid, 3)  # a new server does not know which state nodes hold
    grid.nodes[103].is_online = True
    start(again := place.strategy(), grid, 5)
    kinds = [node.kinds for node in grid.nodes.values()]
    assert kinds[0] == ["full", "delta", "full", "full", "delta"]
    assert kinds[3] == ["full", "delta", "full", "delta"]
    problems = [record["problems"] for record in place.history()]
    assert problems == [{}, {}, {"3": "no node is this client"}, {}, {}]
    assert again.run.snapshot.round == 5


def test_a_client_that_lost_its_disk_receives_the_full_state_within_the_round(place):
    grid, strategy = place.grid(), place.strategy()

    def wipe_after_first_round(round, arrays):
        if round == 1:
            shutil.rmtree(place.path / "state")

    start(strategy, grid, 2, evaluate_fn=wipe_after_first_round)
    assert grid.nodes[100].kinds == ["full", "delta", "full"]
    assert place.history()[1]["clients"] == CLIENTS
    assert_same_bits(strategy.run.snapshot.state, simulated(SSM, 2).state)


def test_a_client_whose_upload_was_lost_continues_with_its_old_memory(place):
    grid, strategy = place.grid(EFFICIENT), place.strategy(EFFICIENT)
    honest = grid.answer

    def losing(node, node_id, message):
        reply = honest(node, node_id, message)
        lost = node.partition == 1 and message.metadata.group_id == "2"
        return Message(RecordDict(), reply_to=message) if lost else reply

    grid.answer = losing
    start(strategy, grid, 3)
    assert "lacks" in place.history()[1]["problems"]["1"]
    # In round 3, client 1 must send what it would have sent if it had not trained in round 2.
    federation = strategy.run.federation
    simulation = fedsift.simulation.prepare(
        make_model(),
        [load_data(n, CLIENTS) for n in range(CLIENTS)],
        None,
        EFFICIENT,
        fedsift.simulation.Options(
            batch_size=8,
            participation=1.0,
            dropout=0.0,
            min_clients=0,
            wire="real",
            loss=nn.functional.cross_entropy,
            seed=SEED,
            device="cpu",
        ),
    )
    snapshot = simulation.initial_snapshot()
    for round in (1, 2, 3):
        lost = frozenset({1}) if round == 2 else frozenset()
        object.__setattr__(simulation, "lost_clients", lambda r, cohort, lost=lost: lost)
        snapshot, _ = simulation.run_round(snapshot)
    assert federation.task.seed == SEED
    assert_same_bits(strategy.run.snapshot.state, snapshot.state)


def test_a_restarted_server_restores_the_receipts_and_ends_with_the_same_bits(place):
    grid = place.grid(EFFICIENT)
    start(first := place.strategy(EFFICIENT), grid, 2)
    start(second := place.strategy(EFFICIENT), grid, 2)
    assert set(first.run.snapshot.receipts) == set(range(CLIENTS))
    assert second.run.snapshot.receipts == first.run.snapshot.receipts
    assert second.run.snapshot.client_memory == {}
    start(second, grid, 4)
    assert_same_bits(second.run.snapshot.state, simulated(EFFICIENT, 4).state)


def test_a_round_ends_after_enough_updates(place):
    grid = place.grid()
    start(place.strategy(enough=3), grid, 1)
    record = place.history()[0]
    assert record["clients"] == 3
    assert list(record["problems"].values()).count("the round had enough replies") == 2


def test_a_round_ends_at_its_timeout_and_reports_silent_clients(place):
    grid = place.grid()
    strategy = place.strategy()
    start(strategy, grid, 1)
    grid.silent = {102}
    start(strategy, grid, 2, timeout=0.5)
    assert place.history()[1]["problems"] == {"2": "no reply within 0.5 s"}


def test_two_nodes_cannot_be_the_same_client(place):
    grid = place.grid()
    grid.nodes[104].partition = 3
    start(place.strategy(), grid, 1)
    assert place.history()[0]["problems"] == {
        "4": "no node is this client",
        "node 104": "it claims to be client 3, which is invalid or already taken",
    }


class BusyGrid(InlineGrid):
    """Its SuperLink fails now and then, and does not accept messages to ``unknown`` nodes."""

    failures, unknown = 0, ()

    def get_node_ids(self):
        self.fail_sometimes()
        return super().get_node_ids()

    def push_messages(self, messages):
        self.fail_sometimes()
        ids = super().push_messages(messages)
        nodes = [message.metadata.dst_node_id for message in messages]
        return [None if node in self.unknown else id for id, node in zip(ids, nodes, strict=True)]

    def fail_sometimes(self):
        self.failures += 1
        if self.failures % 3:
            response = httpx.Response(500, request=httpx.Request("POST", "https://superlink"))
            response.raise_for_status()


def test_a_superlink_that_fails_is_asked_again(place, monkeypatch):
    monkeypatch.setattr(superlink, "WAITS", (0.0,) * 2)
    grid = BusyGrid(place.grid().nodes.values())
    start(place.strategy(), grid, 2)
    assert grid.failures == 3 * 3 * 2  # per round: the nodes, the requests, and the nodes again
    assert [record["problems"] for record in place.history()] == [{}, {}]
    monkeypatch.setattr(superlink, "WAITS", (0.0,))
    with pytest.raises(httpx.HTTPStatusError):
        start(place.strategy(), grid, 3)


def test_a_request_that_the_superlink_does_not_accept_is_a_problem_of_its_node(place, monkeypatch):
    monkeypatch.setattr(superlink, "WAITS", (0.0,) * 2)
    grid = BusyGrid(place.grid().nodes.values())
    start(place.strategy(), grid, 1)
    grid.unknown = (102,)
    start(place.strategy(), grid, 2)
    said = "the SuperLink did not accept the request to it"
    assert place.history()[1]["problems"] == {"2": "no node is this client", "node 102": said}


def test_too_few_nodes_or_updates_stop_the_run_which_can_be_continued(place):
    grid = place.grid()
    for node in grid.nodes.values():
        node.is_online = False
    with pytest.raises(TooFewClients, match=r"0 of at least 4 SuperNodes .* after 0.1 s: start"):
        start(place.strategy(min_clients=4), grid, 1)
    for node in grid.nodes.values():
        node.is_online = True
    grid.silent = {100, 101}
    with pytest.raises(TooFewClients, match="round 1 merged 3 updates, but needs at least 4"):
        start(place.strategy(min_clients=4), grid, 1, timeout=0.5)
    grid.silent = set()
    start(place.strategy(min_clients=4), grid, 1)
    assert place.history()[0]["clients"] == CLIENTS


def test_the_folder_of_another_run_is_refused(place):
    start(place.strategy(), place.grid(), 1)
    with pytest.raises(ConfigError, match=r"holds another run \(seed = 2, not 9\)"):
        start(place.strategy(seed=9), place.grid(), 1)


def test_a_node_without_a_partition_id_is_reported_with_advice(place):
    grid = place.grid()
    grid.nodes[104].partition = None
    start(place.strategy(), grid, 1)
    assert "--node-config" in place.history()[0]["problems"]["node 104"]


def test_a_client_with_another_algorithm_or_model_is_reported(place):
    grid = place.grid(algorithms.fedadam())
    with pytest.raises(TooFewClients, match=r"the server runs fedadam_ssm.*, this client fedadam"):
        start(place.strategy(), grid, 1)
    app = client_app(lambda: nn.Linear(6, 3), load_data, SSM, state_dir=place.path)
    other = InlineGrid(InlineNode(app, n, CLIENTS) for n in range(CLIENTS))
    with pytest.raises(TooFewClients, match="different parameters than this client's"):
        start(place.strategy(), other, 1)


@pytest.mark.parametrize(
    "records",
    [
        {},
        {"fedsift": ConfigRecord({"client": 0})},
        {"fedsift": ConfigRecord({"client": "0", "outcome": "update", "reason": ""})},
        {"fedsift": ConfigRecord({"client": 1.5, "outcome": "failed", "reason": ""}),
         "metrics": MetricRecord({"train_loss": 0.0})},
        {"fedsift": ConfigRecord({"client": 0, "outcome": "gift", "reason": ""}),
         "metrics": MetricRecord({"train_loss": 0.0})},
        {"fedsift": ConfigRecord({"client": 0, "outcome": "update", "reason": ""}),
         "metrics": MetricRecord({"train_loss": 0.0}),
         "frame": ArrayRecord({"update": Array(torch.ones(3))})},
    ],
)  # fmt: skip
def test_a_malformed_reply_is_refused(records):
    with pytest.raises(MalformedReply):
        TrainReply.from_records(RecordDict(records))


def tamper(grid, change, nodes=(100,)):
    """Replace the replies of some nodes: ``change`` maps the honest reply to other records."""
    honest = grid.answer

    def answer(node, node_id, message):
        reply = honest(node, node_id, message)
        if node_id not in nodes:
            return reply
        return Message(change(TrainReply.from_records(reply.content)), reply_to=message)

    grid.answer = answer
    return grid


def with_fields(**fields):
    """Change fields of a reply, and include its frame even if it is empty."""

    def change(reply):
        reply = replace(reply, **fields)
        frame = ArrayRecord({"update": array_of_frame(reply.frame)})
        return RecordDict({**reply.to_records(), "frame": frame})

    return change


def test_losses_whose_sum_overflows_are_averaged(place):
    grid = tamper(place.grid(), with_fields(loss=1.7e308), nodes=(100, 101))
    start(place.strategy(), grid, 1)
    assert place.history()[0]["train_loss"] == pytest.approx(2 / CLIENTS * 1.7e308)


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_losses_do_not_overflow_their_mean(place, sign):
    """With three clients, the sum of the thirds would be rounded to infinity."""
    most = sign * sys.float_info.max
    assert math.isinf(sum(most / 3 for _ in range(3)))
    grid = tamper(place.grid(clients=3), with_fields(loss=most), nodes=(100, 101, 102))
    start(place.strategy(clients=3), grid, 1)
    assert place.history()[0]["train_loss"] == most


def test_a_reply_to_another_message_affects_only_its_node(place):
    grid = place.grid()
    honest = grid.answer

    def answer(node, node_id, message):
        reply = honest(node, node_id, message)
        if node_id in (100, 101):
            # Message 3 is the request to client 2, whose honest reply must still count.
            others = {100: "f" * 64, 101: "3"}
            reply.metadata.__dict__["_reply_to_message_id"] = others[node_id]
        return reply

    grid.answer = answer
    start(place.strategy(), grid, 1)
    record = place.history()[0]
    problem = "its reply names a message that it was not sent"
    assert record["clients"] == CLIENTS - 2
    assert [record["problems"][f"node {n}"] for n in (100, 101)] == [problem] * 2
    assert "2" not in record["problems"]


def test_an_unreadable_reply_affects_only_its_node(place, monkeypatch):
    grid = place.grid()
    pull = grid.pull_messages

    def failing(ids):
        if "1" in ids:
            raise DecodeError("Wrong wire type")
        return pull(ids)

    monkeypatch.setattr(grid, "pull_messages", failing)
    start(place.strategy(), grid, 1)
    record = place.history()[0]
    assert record["clients"] == CLIENTS - 1
    assert record["problems"]["node 100"] == "its reply cannot be read (DecodeError)"


def test_an_unexpected_reply_is_dropped(place):
    strategy = place.strategy()
    start(strategy, place.grid(), 1)
    reply = strategy.run.engine.exchange.requests.message_to(100)
    assert strategy.run.engine.exchange.result_in(reply) is None


@pytest.mark.parametrize("name", METHODS)
def test_an_honest_reply_is_within_the_size_limit(name, place):
    few = {"local_steps": 2, "density": 0.1, "warmup_rounds": 2, "sample_steps": 3}
    algorithm = METHODS[name](**{k: v for k, v in few.items() if k in settings_of(name)})
    strategy = place.strategy(algorithm)
    grid, sizes = place.grid(algorithm), []

    def change(reply):
        sizes.append(len(reply.frame))
        return reply.to_records()

    start(strategy, tamper(grid, change, nodes=range(100, 100 + CLIENTS)), 3)
    largest, header = max(sizes[-CLIENTS:]), 100
    most = strategy.run.engine.exchange.requests.max_reply_bytes - METADATA_BYTES
    dense = 3 * 4 * strategy.run.federation.task.layout.d
    assert largest - header < most < 3 * dense


def array_of(chunks, *children):
    """Return the object of an array that lists its chunks in this order."""
    body = json.dumps({"arraychunk_ids": chunks}).encode()
    return b"Array %s %d\0" % (",".join(children).encode(), len(body)) + body


def test_the_memory_for_decoding_is_bounded():
    chunk = b"ArrayChunk  1000\0" + bytes(1000)
    check_sizes({"a": chunk, "b": array_of([0, 0], "a")}, 3000)
    with pytest.raises(MalformedReply, match="arrays are larger than 3000 bytes"):
        check_sizes({"a": chunk, "b": array_of([0, 0, 0], "a")}, 3000)
    with pytest.raises(MalformedReply, match="arrays are larger"):
        check_sizes({"a": chunk, "b": array_of([0, 0], "a"), "c": array_of([-1], "a")}, 3000)
    record = b"ConfigRecord  %d\0" % RECORD_BYTES + bytes(RECORD_BYTES)
    with pytest.raises(MalformedReply, match="a record of more than"):
        check_sizes({"a": record}, 1 << 40)


def test_an_impossible_weight_affects_only_its_client(place):
    layout = Layout.of(make_model())

    def change(reply):
        update = decode(reply.frame, layout)
        header = read_header(reply.frame)[0]
        spec = Spec(layout, SSM.name, 1, reply.client, header.run, header.base)
        frame = encode(Update(update.parts, (1e-300,)), spec)
        return replace(reply, frame=frame).to_records()

    start(place.strategy(), tamper(place.grid(), change), 1)
    assert place.history()[0]["problems"] == {"0": "weight 1e-300 is outside [1, 8]"}


def test_clients_weigh_what_the_server_says(place):
    strategy = place.strategy(weights="equal", batch_size=None)
    start(strategy, place.grid(), 2)
    result = simulated(SSM, 2, weights="equal", batch_size=None)
    assert_same_bits(strategy.run.snapshot.state, result.state)


@pytest.mark.parametrize("batch_size", [0, -1])
def test_an_empty_batch_is_refused(place, batch_size):
    with pytest.raises(ValueError, match="batch_size must be at least 1, or None for the whole"):
        place.strategy(batch_size=batch_size)


def test_an_empty_frame_affects_only_its_client(place):
    grid = place.grid()

    def tamper_after_first_round(round, arrays):
        if round == 1:
            tamper(grid, with_fields(frame=b""))

    start(place.strategy(), grid, 2, evaluate_fn=tamper_after_first_round)
    record = place.history()[1]
    assert (record["clients"], record["problems"]) == (CLIENTS - 1, {"0": "its frame is empty"})


def test_a_client_that_reports_too_many_samples_is_rejected(place):
    """Without a batch size, the reported number of samples is the weight in the mean."""
    with pytest.raises(TooFewClients, match="weight 20"):
        start(place.strategy(batch_size=None, max_samples=19), place.grid(), 1)


def test_only_merged_updates_count_as_enough(place):
    grid = tamper(place.grid(), with_fields(frame=b"junk" * 9), nodes=(100, 102))
    start(place.strategy(min_clients=3, enough=3), grid, 1)
    record = place.history()[0]
    assert (record["clients"], record["rejected"]) == (3, 2)


def with_flipped_w(reply):
    """Return the honest reply with W multiplied by -100."""
    layout = Layout.of(make_model())
    header = read_header(reply.frame)[0]
    update = decode(reply.frame, layout)
    (part,) = update.parts
    w = CodedValues.of(-100 * part.values["w"].restore())
    update = Update((replace(part, values={**part.values, "w": w}),), update.weights)
    spec = Spec(layout, SSM.name, header.round, reply.client, header.run, header.base)
    return replace(reply, frame=encode(update, spec)).to_records()


def test_far_too_large_updates_are_rejected_from_the_first_round(place):
    strategy = place.strategy()
    start(strategy, tamper(place.grid(), with_flipped_w), 2)
    for record in place.history():
        assert (record["clients"], record["rejected"]) == (CLIENTS - 1, 1)
        assert "times as large as usual in recent rounds" in record["problems"]["0"]
    assert all(len(medians) == 2 for medians in strategy.run.snapshot.norms.medians.values())
    again = place.strategy()
    start(again, place.grid(), 3)
    assert place.history()[2]["clients"] == CLIENTS


def test_far_too_large_updates_are_merged_without_the_bound(place):
    start(place.strategy(max_norm_ratio=None), tamper(place.grid(), with_flipped_w), 1)
    assert (place.history()[0]["clients"], place.history()[0]["rejected"]) == (CLIENTS, 0)


def test_far_too_large_updates_do_not_count_as_enough(place):
    start(place.strategy(enough=3), grid := place.grid(), 1)
    start(place.strategy(enough=3), tamper(grid, with_flipped_w, nodes=(100, 102)), 2)
    record = place.history()[1]
    assert (record["clients"], record["rejected"]) == (3, 2)


def test_unexpected_updates_do_not_count_as_enough(place):
    junk = with_fields(outcome="update", frame=b"junk" * 9)

    def change(reply):
        return junk(reply) if reply.outcome == "absent" else reply.to_records()

    grid = tamper(place.grid(), change, nodes=range(100, 100 + CLIENTS))
    start(place.strategy(participation=0.6, enough=3), grid, 1)
    record = place.history()[0]
    assert (record["clients"], record["rejected"]) == (3, 0)
    assert all("which is not expected" in problem for problem in record["problems"].values())


def test_too_few_updates_are_reported_with_the_right_reason(place):
    grid = place.grid()
    grid.silent = {103, 104}
    with pytest.raises(TooFewClients, match=r"client 3: no reply within 0.5 s; client 4: no reply"):
        start(place.strategy(min_clients=4), grid, 1, timeout=0.5)


def test_a_node_that_claims_twice_to_be_behind_receives_the_full_state_once(place):
    grid = place.grid()
    start(place.strategy(), grid, 1)
    tamper(grid, with_fields(outcome="behind", frame=b""))
    start(place.strategy(), grid, 3)
    problem = "it claims to be behind, but it was sent the whole state"
    assert [record["problems"] for record in place.history()[1:]] == [{"0": problem}] * 2
    assert grid.nodes[100].kinds == ["full"] * 3


def test_text_from_clients_is_made_safe_for_terminals(place):
    rude = "\x1b[2J\x1b[31mowned\n[ROUND 99]\u202e" + "!" * 999
    grid = tamper(place.grid(), with_fields(outcome="failed", reason=rude))
    grid.nodes[101].app = raising(rude)
    start(place.strategy(), grid, 1)
    problems = place.history()[0]["problems"]
    assert "owned" in problems["0"]
    assert "owned" in problems["node 101"]
    assert all(reason.isprintable() and len(reason) <= 200 for reason in problems.values())


def raising(words):
    def app(message, context):
        raise RuntimeError(words)

    return app


def test_a_client_file_survives_a_crash_and_detects_damage(tmp_path, monkeypatch):
    layout = Layout.of(make_model())
    store = ClientStore(tmp_path)
    state = State.start(torch.ones(layout.d))
    store.save(layout, ClientState(state, {b"12345678": {"residual": torch.ones(1, layout.d)}}))

    def crash(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", crash)
        with pytest.raises(KeyboardInterrupt):
            store.save(layout, ClientState(State.start(torch.zeros(layout.d))))
    assert store.file.stat().st_mode & 0o777 == 0o600
    stored = store.load(layout)
    assert_same_bits(stored.state, state)
    assert torch.equal(stored.memories[b"12345678"]["residual"], torch.ones(1, layout.d))
    damaged = bytearray(store.file.read_bytes())
    damaged[-1] ^= 1
    store.file.write_bytes(damaged)
    assert store.load(layout) == ClientState()


def test_a_custom_training_loop_uses_the_adam_of_the_paper(place):
    steps = []

    def train(model, optimizer, data, config):
        x, y = data
        for _ in range(2):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            steps.append((config["note"], config["server-round"]))
        return loss.item()

    whole = {"batch_size": None}
    strategy = place.strategy(**whole)
    config = ConfigRecord({"note": "hello"})
    start(strategy, place.grid(train=train), 2, train_config=config)
    result = simulated(SSM, 2, **whole)
    expected = [("hello", round) for round in (1, 2)]
    assert steps == [step for step in expected for _ in range(2 * CLIENTS)]
    assert dict(config) == {"note": "hello"}
    for custom, built_in in zip(strategy.run.snapshot.state, result.state, strict=True):
        torch.testing.assert_close(custom, built_in, rtol=1e-5, atol=1e-7)


def adam_and_sgd():
    """Return a method that takes SGD steps in rounds 2 to 5 and Adam steps otherwise."""
    adam, sgd = (find(name)(local_steps=2).phase(1) for name in ("fedadam", "fedsgd"))
    phase = {True: sgd, False: replace(adam, send=sgd.send)}
    return Algorithm(lambda round: phase[2 <= round <= 5], name="adam-and-sgd")


def test_a_custom_training_loop_fails_in_a_round_with_other_steps(place, monkeypatch):
    method = adam_and_sgd()
    monkeypatch.setitem(METHODS, method.name, Method(method.name, adam_and_sgd, method.name))
    grid = place.grid(method, train=lambda *_: 0.0)
    strategy = place.strategy(method)
    start(strategy, grid, 1)
    with pytest.raises(TooFewClients, match="does not take the paper's Adam steps"):
        start(strategy, grid, 2)


@pytest.mark.parametrize(
    ("algorithm", "round"), [(EFFICIENT, 1), (algorithms.onebit_adam(warmup_rounds=1), 2)], ids=str
)
def test_a_custom_training_loop_needs_a_method_with_adam_steps(place, algorithm, round):
    grid = place.grid(algorithm, train=lambda *_: 0.0)
    problem = f"does not take the paper's Adam steps in round {round}"
    with pytest.raises(TooFewClients, match=problem):
        start(place.strategy(algorithm), grid, round)


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_adam_follows_the_equations_and_keeps_its_moments(clip):
    model = make_model()
    layout = Layout.of(model)
    x = State(w=layout.read(model), m=torch.rand(layout.d), v=torch.rand(layout.d))
    optimizer = fedsift.Adam(model.parameters(), lr=0.1, eps=1e-3, clip=clip)
    optimizer.load_moments(x.m, x.v)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 6)).square().sum().backward()
        gradient = layout.flatten({n: p.grad for n, p in model.named_parameters()})
        assert gradient.norm() > 0.5
        gradient = clipped(gradient, clip) if clip else gradient
        x = AdamStep(lr=0.1, beta1=0.9, beta2=0.999, eps=1e-3)(x, gradient)
        optimizer.step()
        assert_same_bits((layout.read(model), *optimizer.moments()), x)


def test_a_client_gives_up_at_its_deadline():
    with pytest.raises(TimeoutError, match=r"within the round's 0.05 s"), deadline(0.05):
        time.sleep(60)


def normalized_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def own_loop(model, optimizer, data, config):
    """The local steps of a client with one batch, as a user writes them."""
    x, y = data
    for _ in range(2):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return float(loss.detach())


@pytest.mark.parametrize(
    ("buffers", "train"),
    [("average", None), ("local", None), ("frozen", None), ("local", own_loop)],
)
def test_running_statistics_are_those_of_a_simulation(buffers, train, place):
    batch_size = None if train else 8
    strategy = place.strategy(participation=0.6, buffers=buffers, batch_size=batch_size)
    grid = place.grid(model=normalized_model, buffers=buffers, train=train)
    start(strategy, grid, 2, model=normalized_model)
    again = place.strategy(participation=0.6, buffers=buffers, batch_size=batch_size)
    start(again, grid, 4, model=normalized_model)  # resumed
    data, options = [load_data(n, CLIENTS) for n in range(CLIENTS)], {"participation": 0.6}
    result = fedsift.simulate(
        normalized_model(), data, algorithm=SSM, rounds=4, batch_size=batch_size, seed=SEED,
        buffers=buffers, **options,
    )  # fmt: skip
    if train is None:
        assert_same_bits(again.run.snapshot.state, result.state)
    else:
        torch.testing.assert_close(again.run.snapshot.state.w, result.state.w)
    model = normalized_model()
    model.load_state_dict(load_file(again.run.folder.model_file), strict=False)
    if buffers == "average":
        assert torch.equal(result.layout.read(model), result.weights)
        assert model[1].num_batches_tracked == 8
    uplink = [r["uplink_bytes"] for r in place.history()]
    assert uplink == [pytest.approx(r["uplink_bytes"]) for r in result.history[1:]]


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return self.linear(x)


def test_other_settings_and_other_buffers_are_refused_by_clients(place):
    with pytest.raises(TooFewClients, match="another setting buffers"):
        start(place.strategy(), place.grid(model=normalized_model, buffers="local"), 1,
              model=normalized_model)  # fmt: skip
    shutil.rmtree(place.path / "run")
    with pytest.raises(TooFewClients, match="changes the buffer 'seen': on Flower, only running"):
        start(place.strategy(), place.grid(model=Counting), 1, model=Counting)


def test_a_client_that_computes_other_bits_receives_the_whole_state(place, monkeypatch):
    """As on another kind of processor, where the gradient of a sample can differ."""
    algorithm = algorithms.e3sfc(sample_steps=1, local_steps=1)
    strategy, grid = place.strategy(algorithm), place.grid(algorithm)
    computed = client_round.apply_broadcast

    def other_bits(algorithm, context, state, parts):
        after, clamped = computed(algorithm, context, state, parts)
        return after.replace(w=after.w * (1 + 2**-23)), clamped

    monkeypatch.setattr(client_round, "apply_broadcast", other_bits)
    start(strategy, grid, 3)
    assert [record["clients"] for record in place.history()] == [5, 5, 5]
    assert {tuple(node.kinds) for node in grid.nodes.values()} == {
        ("full", "delta", "full", "delta", "full")
    }


@pytest.mark.parametrize("wanted", [2, 5])
def test_a_run_that_was_rolled_back_continues_with_the_same_bits(wanted, place):
    """The clients of this method have memories, of which they keep as many as the server needs."""
    grid = place.grid(EFFICIENT)
    start(place.strategy(EFFICIENT, keep_checkpoints=4), grid, 5)
    rollback(place.path / "run", wanted)
    assert not (place.path / "run" / "report.html").exists()
    strategy = place.strategy(EFFICIENT, keep_checkpoints=4)
    start(strategy, grid, 6)
    result = simulated(EFFICIENT, 6)
    assert_same_bits(strategy.run.snapshot.state, result.state)
    assert [r["uplink_bytes"] for r in place.history()] == [
        pytest.approx(r["uplink_bytes"]) for r in result.history[1:]
    ]
    store = ClientStore(next((place.path / "state").glob("*/client-0")))
    algorithm_layout = strategy.run.federation.task.layout
    assert len(store.load(algorithm_layout).memories) == 5


@pytest.mark.parametrize("aggregation", ["median", "trimmed"])
def test_robust_aggregation_gives_the_bits_of_a_simulation(aggregation, place):
    method = algorithms.fedadam(local_steps=2)
    strategy = place.strategy(method, aggregation=aggregation)
    start(strategy, place.grid(method), 2)
    result = simulated(method, 2, aggregation=aggregation)
    assert_same_bits(strategy.run.snapshot.state, result.state)
    assert not torch.equal(result.state.w, simulated(method, 2).state.w)
    with pytest.raises(ValueError, match="choose their own"):
        place.strategy(SSM, aggregation=aggregation)


def test_frames_that_wait_for_a_slow_client_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr("fedsift.flower.early_results.MAX_EARLY_BYTES", 10)
    early, frames = EarlyResults(), {n: bytes([n]) * 4 for n in range(5)}
    for n, frame in frames.items():
        early.put(Received(n, frame, frame[:1], 0.5))
    early.put(Missing(5, "lost"))
    assert sum(len(x.frame) for x in early.results.values() if isinstance(x, Received)) == 8
    for n in (3, 0, 4, 2, 1):
        assert early.take(n) == Received(n, frames[n], frames[n][:1], 0.5)
        assert early.take(n) is None
    assert early.take(5) == Missing(5, "lost")
    assert (early.size, early.results, early.places) == (0, {}, {})


@pytest.mark.parametrize("bits", [32, 1])
def test_a_client_that_was_away_replays_the_rounds_that_it_missed(bits, place):
    """It is sent the scalars of these rounds, and not the weights."""
    algorithm = algorithms.decomfl(perturbations=3, bits=bits)
    strategy, grid = place.strategy(algorithm), place.grid(algorithm)

    def leave_and_return(round, arrays):
        grid.nodes[103].is_online = round not in (2, 3, 4)

    start(strategy, grid, 7, evaluate_fn=leave_and_return)
    assert grid.nodes[103].kinds == ["full", "delta", "deltas", "delta"]
    away = [3, 4, 5]
    assert [r["round"] for r in place.history() if "3" in r["problems"]] == away
    sent = [record["downlink_bytes"] for record in place.history()]
    weights = 4 * strategy.run.federation.task.layout.d
    assert all(after - before < weights / 2 for before, after in pairwise(sent))
    assert place.history()[-1]["clients"] == CLIENTS


def test_broadcasts_are_kept_while_they_are_smaller_than_the_weights():
    wire, spec = BroadcastWire(), Spec(Layout.of(make_model()))
    for base in (b"a" * 8, b"b" * 8, b"c" * 8):
        update = Update(dense({"w": torch.zeros(1, spec.layout.d)}, Bit()), (1.0,))
        wire.send(update, replace(spec, base=base), Limits())
    assert [len(wire.since(base)) for base in (b"a" * 8, b"b" * 8, b"c" * 8, b"d" * 8)] == [
        3,
        2,
        1,
        0,
    ]
    wire.forget(2 * len(wire.since(b"c" * 8)[0]))
    assert wire.since(b"a" * 8) == []
    wire.forget(0)
    assert len(wire.since(b"c" * 8)) == 1

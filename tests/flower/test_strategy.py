"""The strategy and the client, without processes: who is sent what, and what becomes of it."""

import json
import math
import shutil
import sys
import time
from dataclasses import replace

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
from fedsift.codec.update import CodedValues, Update
from fedsift.errors import ConfigError, TooFewClients
from fedsift.flower import FedSift, arrays_of, client_app, exchange
from fedsift.flower.arrays import flat
from fedsift.flower.client import deadline
from fedsift.flower.deployment import METADATA_BYTES
from fedsift.flower.protocol import Answer, Malformed, packed
from fedsift.flower.pull import RECORD_BYTES, check_sizes
from fedsift.flower.store import Kept, Store
from fedsift.runs import federation_of
from fedsift.runs.config import (
    RunConfig,
)
from fedsift.simulation import initial_snapshot, run_rounds
from fedsift.vector import Layout, Moments

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
    """A federation in this process: its grid, its strategy, and how to start it."""
    return Place(tmp_path)


class Place:
    def __init__(self, path):
        self.path = path

    def grid(self, algorithm=SSM, clients=CLIENTS, model=make_model, **options):
        app = client_app(model, load_data, algorithm, state_dir=self.path / "state", **options)
        return InlineGrid(InlineNode(app, n, clients) for n in range(clients))

    def strategy(self, algorithm=SSM, clients=CLIENTS, **options):
        options = {"batch_size": 8, "seed": SEED, "wait": 0.1, **options}
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


@pytest.mark.parametrize("name", METHODS)
def test_every_method_ends_with_the_simulation_s_bits(name, place):
    few = {"local_steps": 2, "density": 0.1, "warmup_rounds": 2}
    algorithm = METHODS[name](**{k: v for k, v in few.items() if k in settings_of(name)})
    strategy = place.strategy(algorithm, participation=0.6)
    start(strategy, place.grid(algorithm), 4)
    result = simulated(algorithm, 4, participation=0.6)
    assert_same_bits(strategy.snapshot.state, result.state)
    model = make_model()
    model.load_state_dict(load_file(strategy.folder.model_file))
    assert torch.equal(result.layout.read(model), result.weights)
    assert torch.equal(flat(strategy.result.arrays)[1], result.weights)
    assert [r["uplink_bytes"] for r in place.history()] == [
        pytest.approx(r["uplink_bytes"]) for r in result.history
    ]


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
def test_a_model_may_have_negative_zeros_or_frozen_parameters(place, model):
    strategy = place.strategy()
    start(strategy, place.grid(model=model), 2, model=model)
    clients = [load_data(n, CLIENTS) for n in range(CLIENTS)]
    result = fedsift.simulate(model(), clients, algorithm=SSM, rounds=2, batch_size=8, seed=SEED)
    assert_same_bits(strategy.snapshot.state, result.state)


def test_a_model_of_a_type_that_flower_does_not_have_is_refused():
    with pytest.raises(ValueError, match="no bfloat16"):
        arrays_of(make_model().bfloat16())


def test_all_parameters_of_a_model_with_frozen_ones_are_refused_with_advice(place):
    arrays = ArrayRecord(frozen().state_dict())
    with pytest.raises(TooFewClients, match=r"arrays_of\(model\)"):
        place.strategy().start(place.grid(model=frozen), arrays, 1, 60.0)


def test_the_demo_s_clients_train_as_the_simulation_does(place, monkeypatch):
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
    assert_same_bits(strategy.snapshot.state, expected.state)


def test_the_result_and_the_records_are_those_of_a_strategy(place):
    def evaluate(round, arrays):
        return MetricRecord({"accuracy": 0.1 * round, "loss": 2.0})

    result = start(place.strategy(), place.grid(), 2, evaluate_fn=evaluate)
    model = make_model()
    model.load_state_dict(result.arrays.to_torch_state_dict())
    assert torch.equal(Layout.of(model).read(model), simulated(SSM, 2).state.w)
    assert [r["accuracy"] for r in place.history()] == [0.1, 0.2]
    assert result.train_metrics_clientapp[2]["clients"] == CLIENTS
    assert result.evaluate_metrics_serverapp[2]["accuracy"] == 0.2


def test_who_holds_the_last_state_is_sent_the_change_and_others_everything(place):
    grid, strategy = place.grid(), place.strategy()
    start(strategy, grid, 2)
    grid.nodes[103].is_online = False
    start(place.strategy(), grid, 3)  # a new server knows of nobody what it holds
    grid.nodes[103].is_online = True
    start(again := place.strategy(), grid, 5)
    kinds = [node.kinds for node in grid.nodes.values()]
    assert kinds[0] == ["full", "delta", "full", "full", "delta"]
    assert kinds[3] == ["full", "delta", "full", "delta"]
    problems = [record["problems"] for record in place.history()]
    assert problems == [{}, {}, {"3": "no node is this client"}, {}, {}]
    assert again.snapshot.round == 5


def test_a_client_that_lost_its_disk_is_brought_up_to_date_within_the_round(place):
    grid, strategy = place.grid(), place.strategy()
    wiped = []

    def wipe_once(round, arrays):
        if not wiped:
            wiped.append(shutil.rmtree(place.path / "state"))
        return

    start(strategy, grid, 2, evaluate_fn=wipe_once)
    assert grid.nodes[100].kinds == ["full", "delta", "full"]
    assert place.history()[1]["clients"] == CLIENTS
    assert_same_bits(strategy.snapshot.state, simulated(SSM, 2).state)


def test_a_client_whose_upload_was_lost_trains_on_with_its_old_memory(place):
    grid, strategy = place.grid(EFFICIENT), place.strategy(EFFICIENT)
    honest = grid.answer

    def losing(node, node_id, message):
        reply = honest(node, node_id, message)
        lost = node.partition == 1 and message.metadata.group_id == "2"
        return Message(RecordDict(), reply_to=message) if lost else reply

    grid.answer = losing
    start(strategy, grid, 3)
    assert "lacks" in place.history()[1]["problems"]["1"]
    # Client 1 must send in round 3 what it would have sent had it never trained in round 2.
    federation = strategy.federation
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
    assert_same_bits(strategy.snapshot.state, snapshot.state)


def test_a_round_ends_when_it_has_enough(place):
    grid = place.grid()
    start(place.strategy(enough=3), grid, 1)
    record = place.history()[0]
    assert record["clients"] == 3
    assert list(record["problems"].values()).count("the round had enough replies") == 2


def test_a_round_ends_in_time_and_the_silent_are_named(place):
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
        "node 104": "it says that it is client 3, which it cannot be",
    }


def test_too_few_nodes_or_updates_stop_the_run_and_it_goes_on_later(place):
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


def test_another_run_s_folder_is_refused(place):
    start(place.strategy(), place.grid(), 1)
    with pytest.raises(ConfigError, match=r"holds another run \(seed = 2, not 9\)"):
        start(place.strategy(seed=9), place.grid(), 1)


def test_a_node_that_was_not_told_which_client_it_is_says_so(place):
    grid = place.grid()
    grid.nodes[104].partition = None
    start(place.strategy(), grid, 1)
    assert "--node-config" in place.history()[0]["problems"]["node 104"]


def test_a_client_of_another_algorithm_or_model_is_named(place):
    grid = place.grid(algorithms.fedadam())
    with pytest.raises(TooFewClients, match=r"the server runs fedadam_ssm.*, this client fedadam"):
        start(place.strategy(), grid, 1)
    app = client_app(lambda: nn.Linear(6, 3), load_data, SSM, state_dir=place.path)
    other = InlineGrid(InlineNode(app, n, CLIENTS) for n in range(CLIENTS))
    with pytest.raises(TooFewClients, match="other parameters than this client's"):
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
def test_a_malformed_answer_is_refused(records):
    with pytest.raises(Malformed):
        Answer.read(RecordDict(records))


def evil(grid, say, nodes=(100,)):
    """Let some nodes say what they like; it is made of their honest answer."""
    honest = grid.answer

    def answer(node, node_id, message):
        reply = honest(node, node_id, message)
        if node_id not in nodes:
            return reply
        return Message(say(Answer.read(reply.content)), reply_to=message)

    grid.answer = answer
    return grid


def lie(**words):
    """An answer with other words; its frame is there also where it is empty."""

    def say(answer):
        answer = replace(answer, **words)
        frame = ArrayRecord({"update": packed(answer.frame)})
        return RecordDict({**answer.records(), "frame": frame})

    return say


def test_losses_that_no_sum_can_hold_are_still_told(place):
    grid = evil(place.grid(), lie(loss=1.7e308), nodes=(100, 101))
    start(place.strategy(), grid, 1)
    assert place.history()[0]["train_loss"] == pytest.approx(2 / CLIENTS * 1.7e308)


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_losses_do_not_overflow_their_mean(place, sign):
    """With three clients, rounding would take the sum of the thirds to infinity."""
    most = sign * sys.float_info.max
    assert math.isinf(sum(most / 3 for _ in range(3)))
    grid = evil(place.grid(clients=3), lie(loss=most), nodes=(100, 101, 102))
    start(place.strategy(clients=3), grid, 1)
    assert place.history()[0]["train_loss"] == most


def test_a_reply_to_another_message_is_a_problem_of_its_node_alone(place):
    grid = place.grid()
    honest = grid.answer

    def answer(node, node_id, message):
        reply = honest(node, node_id, message)
        if node_id in (100, 101):
            # Message 3 is the order of client 2, whose honest reply must still count.
            others = {100: "f" * 64, 101: "3"}
            reply.metadata.__dict__["_reply_to_message_id"] = others[node_id]
        return reply

    grid.answer = answer
    start(place.strategy(), grid, 1)
    record = place.history()[0]
    said = "its reply names a message that it was not sent"
    assert record["clients"] == CLIENTS - 2
    assert [record["problems"][f"node {n}"] for n in (100, 101)] == [said] * 2
    assert "2" not in record["problems"]


def test_a_reply_that_flower_cannot_read_is_a_problem_of_its_node_alone(place, monkeypatch):
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


def test_a_reply_that_nobody_waits_for_is_dropped(place):
    strategy = place.strategy()
    start(strategy, place.grid(), 1)
    reply = strategy.exchange.orders.message(100)
    assert strategy.exchange.read(reply) is None


@pytest.mark.parametrize("name", METHODS)
def test_an_honest_reply_is_within_the_bound(name, place):
    few = {"local_steps": 2, "density": 0.1, "warmup_rounds": 2}
    algorithm = METHODS[name](**{k: v for k, v in few.items() if k in settings_of(name)})
    strategy = place.strategy(algorithm)
    grid, sizes = place.grid(algorithm), []

    def say(answer):
        sizes.append(len(answer.frame))
        return answer.records()

    start(strategy, evil(grid, say, nodes=range(100, 100 + CLIENTS)), 3)
    largest, header = max(sizes[-CLIENTS:]), 100
    most = strategy.exchange.orders.max_reply_bytes - METADATA_BYTES
    dense = 3 * 4 * strategy.layout.d
    assert largest - header < most < 3 * dense


def array_of(chunks, *children):
    """An array's object that lists its chunks in this order."""
    body = json.dumps({"arraychunk_ids": chunks}).encode()
    return b"Array %s %d\0" % (",".join(children).encode(), len(body)) + body


def test_what_decoding_would_take_is_bounded():
    chunk = b"ArrayChunk  1000\0" + bytes(1000)
    check_sizes({"a": chunk, "b": array_of([0, 0], "a")}, 3000)
    with pytest.raises(Malformed, match="arrays are larger than 3000 bytes"):
        check_sizes({"a": chunk, "b": array_of([0, 0, 0], "a")}, 3000)
    with pytest.raises(Malformed, match="arrays are larger"):
        check_sizes({"a": chunk, "b": array_of([0, 0], "a"), "c": array_of([-1], "a")}, 3000)
    record = b"ConfigRecord  %d\0" % RECORD_BYTES + bytes(RECORD_BYTES)
    with pytest.raises(Malformed, match="a record of more than"):
        check_sizes({"a": record}, 1 << 40)


def test_a_weight_that_no_batch_has_is_a_problem_of_its_client_alone(place):
    layout = Layout.of(make_model())

    def say(answer):
        update = decode(answer.frame, layout)
        header = read_header(answer.frame)[0]
        spec = Spec(layout, SSM.name, 1, answer.client, header.run, header.base)
        frame = encode(Update(update.parts, (1e-300,)), spec)
        return replace(answer, frame=frame).records()

    start(place.strategy(), evil(place.grid(), say), 1)
    assert place.history()[0]["problems"] == {"0": "weight 1e-300 is outside [1, 8]"}


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_has_a_sample(place, batch_size):
    with pytest.raises(ValueError, match="batch_size must be at least 1, or None for all"):
        place.strategy(batch_size=batch_size)


def test_an_empty_frame_is_a_problem_of_its_client_alone(place):
    strategy, grid = place.strategy(), place.grid()
    start(strategy, grid, 1)
    start(strategy, evil(grid, lie(frame=b"")), 2)
    record = place.history()[1]
    assert (record["clients"], record["problems"]) == (CLIENTS - 1, {"0": "its frame is empty"})


def test_a_client_with_more_samples_than_it_may_have_is_left_out(place):
    """With whole local sets as batches, what a client says it has is its weight in the mean."""
    with pytest.raises(TooFewClients, match="weight 20"):
        start(place.strategy(batch_size=None, max_samples=19), place.grid(), 1)


def test_only_updates_that_are_merged_are_enough(place):
    grid = evil(place.grid(), lie(frame=b"junk" * 9), nodes=(100, 102))
    start(place.strategy(min_clients=3, enough=3), grid, 1)
    record = place.history()[0]
    assert (record["clients"], record["rejected"]) == (3, 2)


def flipped(answer):
    """The honest answer with W × -100."""
    layout = Layout.of(make_model())
    header = read_header(answer.frame)[0]
    update = decode(answer.frame, layout)
    (part,) = update.parts
    w = CodedValues.of(-100 * part.values["w"].restore())
    update = Update((replace(part, values={**part.values, "w": w}),), update.weights)
    spec = Spec(layout, SSM.name, header.round, answer.client, header.run, header.base)
    return replace(answer, frame=encode(update, spec)).records()


def test_an_update_that_is_far_too_large_is_rejected_from_the_first_round_on(place):
    strategy = place.strategy()
    start(strategy, evil(place.grid(), flipped), 2)
    for record in place.history():
        assert (record["clients"], record["rejected"]) == (CLIENTS - 1, 1)
        assert "times as large as usual in recent rounds" in record["problems"]["0"]
    assert all(len(medians) == 2 for medians in strategy.snapshot.norms.medians.values())
    again = place.strategy()
    start(again, place.grid(), 3)
    assert place.history()[2]["clients"] == CLIENTS


def test_an_update_that_is_far_too_large_is_merged_without_the_bound(place):
    start(place.strategy(max_norm_ratio=None), evil(place.grid(), flipped), 1)
    assert (place.history()[0]["clients"], place.history()[0]["rejected"]) == (CLIENTS, 0)


def test_updates_that_are_far_too_large_are_not_enough(place):
    start(place.strategy(enough=3), grid := place.grid(), 1)
    start(place.strategy(enough=3), evil(grid, flipped, nodes=(100, 102)), 2)
    record = place.history()[1]
    assert (record["clients"], record["rejected"]) == (3, 2)


def test_an_update_that_nobody_asked_for_is_not_one_of_those_that_are_enough(place):
    junk = lie(outcome="update", frame=b"junk" * 9)

    def say(answer):
        return junk(answer) if answer.outcome == "absent" else answer.records()

    grid = evil(place.grid(), say, nodes=range(100, 100 + CLIENTS))
    start(place.strategy(participation=0.6, enough=3), grid, 1)
    record = place.history()[0]
    assert (record["clients"], record["rejected"]) == (3, 0)
    assert all("which is not due" in problem for problem in record["problems"].values())


def test_too_few_updates_are_told_with_the_right_reason(place):
    grid = place.grid()
    grid.silent = {103, 104}
    with pytest.raises(TooFewClients, match=r"client 3: no reply within 0.5 s; client 4: no reply"):
        start(place.strategy(min_clients=4), grid, 1, timeout=0.5)


def test_who_says_again_that_it_is_behind_is_not_sent_everything_again(place):
    grid = place.grid()
    start(place.strategy(), grid, 1)
    evil(grid, lie(outcome="behind", frame=b""))
    start(place.strategy(), grid, 3)
    said = "it says that it is behind, but it was sent everything"
    assert [record["problems"] for record in place.history()[1:]] == [{"0": said}] * 2
    assert grid.nodes[100].kinds == ["full"] * 3


def test_what_a_client_says_reaches_no_terminal_as_it_is(place):
    rude = "\x1b[2J\x1b[31mowned\n[ROUND 99]\u202e" + "!" * 999
    grid = evil(place.grid(), lie(outcome="failed", reason=rude))
    grid.nodes[101].app = raising(rude)
    start(place.strategy(), grid, 1)
    said = place.history()[0]["problems"]
    assert "owned" in said["0"]
    assert "owned" in said["node 101"]
    assert all(reason.isprintable() and len(reason) <= 200 for reason in said.values())


def raising(words):
    def app(message, context):
        raise RuntimeError(words)

    return app


def test_a_client_s_file_survives_a_crash_and_shows_damage(tmp_path, monkeypatch):
    layout = Layout.of(make_model())
    store = Store(tmp_path)
    state = Moments.start(torch.ones(layout.d))
    store.save(layout, Kept(state, {b"12345678": {"residual": torch.ones(1, layout.d)}}))

    def die(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", die)
        with pytest.raises(KeyboardInterrupt):
            store.save(layout, Kept(Moments.start(torch.zeros(layout.d))))
    assert store.file.stat().st_mode & 0o777 == 0o600
    kept = store.load(layout)
    assert_same_bits(kept.state, state)
    assert torch.equal(kept.memories[b"12345678"]["residual"], torch.ones(1, layout.d))
    damaged = bytearray(store.file.read_bytes())
    damaged[-1] ^= 1
    store.file.write_bytes(damaged)
    assert store.load(layout) == Kept()


def test_a_loop_of_one_s_own_trains_by_the_paper_s_adam(place):
    steps = []

    def train(model, optimizer, data, config):
        x, y = data
        for _ in range(2):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            steps.append(config["note"])
        return loss.item()

    whole = {"batch_size": None}
    strategy = place.strategy(**whole)
    config = ConfigRecord({"note": "hello"})
    start(strategy, place.grid(train=train), 2, train_config=config)
    result = simulated(SSM, 2, **whole)
    assert steps == ["hello"] * 2 * 2 * CLIENTS
    for own, built_in in zip(strategy.snapshot.state, result.state, strict=True):
        torch.testing.assert_close(own, built_in, rtol=1e-5, atol=1e-7)


def adam_and_sgd():
    """A method that takes other steps from the second round on to the fifth."""
    adam, sgd = (find(name)(local_steps=2).phase(1) for name in ("fedadam", "fedsgd"))
    phase = {True: sgd, False: replace(adam, send=sgd.send)}
    return Algorithm(lambda round: phase[2 <= round <= 5], name="adam-and-sgd")


def test_a_loop_of_one_s_own_ends_where_the_method_takes_other_steps(place, monkeypatch):
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
def test_adam_moves_like_the_equations_and_keeps_its_moments(clip):
    model = make_model()
    layout = Layout.of(model)
    x = Moments(layout.read(model), torch.rand(layout.d), torch.rand(layout.d))
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

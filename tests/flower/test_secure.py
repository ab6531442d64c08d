"""Secure aggregation on Flower, with clients in this process: the bits of the simulation."""

import json
import stat
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, RecordDict
from inline import InlineGrid, InlineNode
from torch import nn

import fedsift
from fedsift import algorithms
from fedsift.codec.update import Update, dense
from fedsift.engine.contract import ClientResult
from fedsift.flower import FedSift, arrays_of, client_app, secure_client, secure_rounds
from fedsift.flower.client_round import ClientRound
from fedsift.flower.protocol import RefusedRequest, TrainReply
from fedsift.flower.secure_client import (
    SECURE_RECORD,
    SPENT,
    SecureFile,
    SecureQuery,
    SecureReply,
    answer_query,
    basis_of,
)
from fedsift.privacy.secure import SecureSettings, SecureSumStopped
from fedsift.privacy.secure.client import SecureClient
from fedsift.privacy.secure.exchange import StageBytes, run_exchange
from fedsift.privacy.secure.messages import Reader, SecureStage
from fedsift.privacy.secure.server import SecureServer
from fedsift.privacy.secure.storage import client_from_json, client_to_json
from fedsift.vector import State

CLIENTS = 4
METHOD = algorithms.sift_common(density=0.3, local_steps=2, shares=4)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


def load_data(client, clients):
    draw = torch.Generator().manual_seed(client)
    x = torch.randn(20 + client, 6, generator=draw)
    return x, (x[:, 0] > 0).long()


class SilentGrid(InlineGrid):
    """Clients in ``lost`` do not reply from a stage on; ``seen`` are all the server receives."""

    def __init__(self, nodes):
        super().__init__(nodes)
        self.lost, self.seen = {}, []

    def push(self, message):
        if SECURE_RECORD in message.content.config_records:
            query = SecureQuery.from_records(message.content)
            stage = Reader(query.request).header().stage
            partition = self.nodes[message.metadata.dst_node_id].partition
            self.silent = set()
            if stage >= self.lost.get(partition, 99):
                self.silent = {message.metadata.dst_node_id}
        name = super().push(message)
        self.silent = set()
        return name


@pytest.fixture
def federation(tmp_path, monkeypatch):
    monkeypatch.setattr(secure_rounds, "QUERY_SECONDS", 0.05)
    monkeypatch.setattr(secure_rounds, "POLL_SECONDS", 0.01)

    def build(method=METHOD, secure=True, client_secure=True, **options):
        app = client_app(
            make_model, load_data, method, secure=client_secure, state_dir=tmp_path / "state"
        )
        grid = SilentGrid(InlineNode(app, n, CLIENTS) for n in range(CLIENTS))
        options = {"batch_size": 8, "seed": 1, "wait": 0.1, **options}
        strategy = FedSift(method, CLIENTS, tmp_path / "run", secure=secure, **options)
        return strategy, grid

    return build


def simulated(lost=(), rounds=3, **options):
    """The clear run in which some clients are lost in round 2."""
    from fedsift.federation.round import Federation

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Federation, "lost_clients", lambda self, n, cohort: frozenset(lost if n == 2 else ())
        )
        return fedsift.simulate(
            make_model(), [load_data(n, CLIENTS) for n in range(CLIENTS)], algorithm=METHOD,
            rounds=rounds, batch_size=8, seed=1, device="cpu", progress=False, wire="real",
            **options,
        )  # fmt: skip


def assert_same_bits(strategy, result):
    for name in result.state.names:
        assert torch.equal(strategy.run.snapshot.state[name], result.state[name]), name


def history(tmp_path):
    return [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def test_a_secure_federation_has_the_bits_and_the_bytes_of_the_simulation(federation, tmp_path):
    strategy, grid = federation()
    strategy.start(grid, arrays_of(make_model()), 3, 60.0)
    assert_same_bits(strategy, simulated())
    rounds, secure = history(tmp_path), simulated(secure=True)
    for record, theirs in zip(rounds, secure.history[1:], strict=True):
        assert (record["clients"], record["problems"]) == (CLIENTS, {})
        assert record.get("secure") == theirs.get("secure")
        assert ("secure" in record) == (record["round"] > 1)  # round 1 has no values to sum
        assert record["uplink_bytes"] == theirs["uplink_bytes"]
    files = list((tmp_path / "state").rglob("secure.json"))
    assert len(files) == CLIENTS
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


@pytest.mark.parametrize(
    ("stage", "in_sum"),
    [(SecureStage.MASKED, False), (SecureStage.CONSENT, True), (SecureStage.REVEAL, True)],
)
def test_a_client_lost_at_a_stage_is_in_the_sum_if_its_values_arrived(
    stage, in_sum, federation, tmp_path
):
    strategy, grid = federation()
    begun = strategy.configure_train

    def configure(round, *rest):
        grid.lost = {2: stage} if round == 2 else {}
        return begun(round, *rest)

    strategy.configure_train = configure
    strategy.start(grid, arrays_of(make_model()), 3, 60.0)
    assert_same_bits(strategy, simulated(() if in_sum else {2}))
    assert [record["clients"] for record in history(tmp_path)] == [4, 4 if in_sum else 3, 4]


def test_the_server_gets_no_values_in_the_clear(federation):
    strategy, grid = federation()
    strategy.start(grid, arrays_of(make_model()), 2, 60.0)
    (shape,) = {strategy.run.federation.expected_shape(strategy.run.engine.current.requests.job)}
    assert [roles for roles, _, _ in shape] == [("c",)]


def test_a_client_that_is_secure_sends_nothing_to_a_server_that_is_not(federation):
    strategy, grid = federation(secure=False)
    with pytest.raises(fedsift.federation.TooFewClients):
        strategy.start(grid, arrays_of(make_model()), 2, 60.0)


def test_a_server_that_was_started_again_makes_new_keys_and_continues(federation, tmp_path):
    strategy, grid = federation()
    strategy.start(grid, arrays_of(make_model()), 2, 60.0)
    again, grid = federation()
    again.start(grid, arrays_of(make_model()), 3, 60.0)
    assert_same_bits(again, simulated())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": algorithms.sift()}, "the clients of sift send different coordinates"),
        ({"participation": 0.5}, "needs at least 3 clients per round, got 2"),
    ],
)
def test_what_cannot_be_secure_is_refused_in_one_line(options, message, federation):
    with pytest.raises(ValueError, match=message):
        federation(**options)


def test_malformed_queries_and_replies_are_refused_in_one_line(tmp_path):
    for records in (RecordDict(), SecureReply(1, b"x").to_records()):
        with pytest.raises(ValueError, match="query cannot be read"):
            SecureQuery.from_records(records)
    with pytest.raises(ValueError, match="an id has an invalid value"):
        SecureQuery.from_records(SecureQuery(b"short", b"ids", b"x").to_records())
    for records in (RecordDict(), SecureQuery(bytes(8), bytes(8), b"x").to_records()):
        with pytest.raises(ValueError, match="its reply lacks"):
            SecureReply.from_records(records)


def test_a_client_is_stored_with_everything_it_knows(federation, tmp_path):
    strategy, grid = federation()
    strategy.start(grid, arrays_of(make_model()), 2, 60.0)
    file = next((tmp_path / "state").rglob("secure.json"))
    client = client_from_json(json.loads(file.read_text())["client"])
    assert isinstance(client, SecureClient)
    assert client.current.consent
    assert len(client.peers) == CLIENTS - 1
    assert client_from_json(client_to_json(client)) == client


def test_values_that_were_in_a_sum_are_refused_to_a_new_session(tmp_path):
    """The server gets the sum of eight clients, and asks again for that of three of them.

    It did not ask these three to reveal their masks: neighbors restored them.
    """
    values = np.arange(5, dtype=np.int8)
    for client in range(8):
        SecureFile(tmp_path / f"{client}/secure.json", 1, 1, values.tobytes()).save()
    reasons = []

    def total_of(clients, session, unaware=()):
        server = SecureServer(bytes(8) + session, SecureSettings())

        def ask(request):
            found = {
                u: answer_query(
                    SecureQuery(bytes(8), session, message),
                    u,
                    tmp_path / str(u),
                    SecureSettings(),
                )
                for u, message in request.messages.items()
                if request.stage < SecureStage.REVEAL or u not in unaware
            }
            reasons.extend(reply.reason for reply in found.values() if reply.reason)
            return {u: reply.reply for u, reply in found.items() if reply.reply}

        return run_exchange(server, 1, clients, 5, 7, ask, StageBytes()).total

    assert total_of(range(8), b"session1", unaware={0, 1, 2}).tolist() == (8 * values).tolist()
    with pytest.raises(SecureSumStopped):
        total_of(range(3), b"session2")
    assert reasons == 3 * [SPENT]


@pytest.mark.parametrize("stage", [SecureStage.CONSENT, SecureStage.REVEAL])
def test_a_server_killed_after_values_were_masked_skips_the_round(
    stage, federation, tmp_path, monkeypatch
):
    strategy, grid = federation()
    push = grid.push

    def killed(message):
        if SECURE_RECORD in message.content.config_records:
            header = Reader(SecureQuery.from_records(message.content).request).header()
            if (header.round, header.stage) == (3, stage):
                raise KeyboardInterrupt
        return push(message)

    grid.push = killed
    with pytest.raises(KeyboardInterrupt):
        strategy.start(grid, arrays_of(make_model()), 4, 60.0)
    again, grid = federation()
    again.start(grid, arrays_of(make_model()), 5, 60.0)
    rounds = history(tmp_path)
    assert [record["clients"] for record in rounds] == [CLIENTS, CLIENTS, 0, CLIENTS, CLIENTS]
    assert "masked in another session" in rounds[2]["problems"]["0"]


def test_values_computed_from_another_model_or_configuration_have_another_basis(
    federation, tmp_path
):
    """Masks cancel only between clients with the same basis, see test_inconsistent_server.py."""
    state = State(w=torch.zeros(3), c=torch.ones(3))
    config = ConfigRecord({"lr": 0.1, "server-round": 2})
    found = [
        basis_of(state, config),
        basis_of(state.replace(c=torch.full((3,), 1e3)), config),
        basis_of(State(w=torch.zeros(3), m=torch.ones(3)), config),
        basis_of(state, ConfigRecord({"lr": 0.0, "server-round": 2})),
    ]
    assert len({*found}) == len(found)
    assert basis_of(state, ConfigRecord({"server-round": 2, "lr": 0.1})) == found[0]
    strategy, grid = federation()
    strategy.start(grid, arrays_of(make_model()), 2, 60.0)
    files = [SecureFile.load(path.parent) for path in (tmp_path / "state").rglob("secure.json")]
    assert {len(file.basis) for file in files} == {32}
    assert len({file.basis for file in files}) == 1


def test_the_server_gets_no_client_s_loss(federation, tmp_path):
    strategy, grid = federation()
    losses, received = [], TrainReply.from_records
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            TrainReply,
            "from_records",
            lambda records: (losses.append(received(records).loss), received(records))[1],
        )
        strategy.start(grid, arrays_of(make_model()), 2, 60.0)
    assert len(losses) == 2 * CLIENTS
    assert np.isnan(losses).all()
    assert [record["train_loss"] for record in history(tmp_path)] == [None, None]


def test_a_secure_client_sends_no_running_statistics(tmp_path):
    """The server refuses them, too; but a client does not rely on it."""
    statistics = ClientResult(0, Update(dense({"b": torch.zeros(1, 2)}), (1.0,)), {}, 0.5, None)
    round = ClientRound(None, METHOD, METHOD, None, 0, None, secure=SecureSettings())
    with pytest.raises(RefusedRequest, match='choose buffers="local" or "frozen"'):
        round.without_summed(statistics, None)


def test_two_queries_at_once_are_answered_one_after_another(tmp_path, monkeypatch):
    """Two Flower runs of one SuperLink can send messages to two processes of a SuperNode."""
    now, most = set(), []

    def slow(query, client, file, settings):
        now.add(query.request)
        most.append(len(now))
        time.sleep(0.05)
        now.remove(query.request)
        return file, b"reply"

    monkeypatch.setattr(secure_client, "answered", slow)

    def ask(n):
        query = SecureQuery(bytes(8), bytes(8), bytes([n]))
        return answer_query(query, 0, tmp_path / "0", SecureSettings()).reply

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == 4 * [b"reply"]
    assert most == [1, 1, 1, 1]

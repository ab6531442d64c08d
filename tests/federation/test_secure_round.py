"""Secure aggregation in simulations: the same model bit for bit, and every byte counted."""

from collections import Counter

import pytest
import torch
from torch import nn

import fedsift
from fedsift import algorithms
from fedsift.cli.entry import main
from fedsift.federation import secure_round
from fedsift.federation.round import Federation
from fedsift.privacy import DifferentialPrivacy, SecureSettings
from fedsift.runs.folder import RunFolder

CLIENTS = 8


def client(seed, samples=40):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, generator=draw)
    return x, (x[:, 0] > 0).long()


def train(rounds=3, samples=lambda n: 40, clients=CLIENTS, **more):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
    more.setdefault("algorithm", algorithms.sift_common(density=0.2, local_steps=2, shares=4))
    data = [client(n, samples(n)) for n in range(clients)]
    return fedsift.simulate(
        model, data, test=client(99), rounds=rounds, batch_size=16, device="cpu", progress=False,
        **more,
    )  # fmt: skip


def assert_same_bits(first, second):
    assert torch.equal(first.weights, second.weights)
    for name in first.state.names:
        assert torch.equal(first.state[name], second.state[name])
    for client, memory in first.snapshot.client_memory.items():
        assert torch.equal(memory["residual"], second.snapshot.client_memory[client]["residual"])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"wire": "real"},
        {"participation": 0.6},
        {"weights": "examples", "samples": lambda n: 20 + 7 * n},
        {"secure": SecureSettings(neighbors=4, threshold=3)},
    ],
    ids=["plain", "real frames", "cohorts", "weights", "sparse graph"],
)
def test_a_secure_and_a_clear_run_have_the_same_bits(options):
    secure = train(**{"secure": True, **options})
    clear = train(**{**options, "secure": False})
    assert_same_bits(clear, secure)
    assert [r["clients"] for r in clear.history] == [r["clients"] for r in secure.history]


def test_with_losses_it_has_the_bits_of_a_clear_run_of_the_clients_in_the_sum(monkeypatch):
    secure = train(rounds=8, secure=True, dropout=0.2, seed=4)
    left_out = [{int(n) for n in record["problems"]} for record in secure.history]
    in_sum = [record["clients"] for record in secure.history[1:]]
    assert set(in_sum) >= {0, CLIENTS}  # some round stopped, and some had late losses only
    assert any(0 < n < CLIENTS for n in in_sum)
    lost = Federation.lost_clients  # in round 1 there are no values to sum
    monkeypatch.setattr(
        Federation,
        "lost_clients",
        lambda self, n, cohort: frozenset(left_out[n]) if n > 1 else lost(self, n, cohort),
    )
    assert_same_bits(train(rounds=8, dropout=0.2, seed=4), secure)


def test_every_byte_of_every_message_is_counted(monkeypatch):
    sent = Counter()
    reply_of = secure_round.reply_of

    def counted(client, stage, request, codes):
        reply = reply_of(client, stage, request, codes)
        sent["down", stage.name.lower()] += len(request)
        sent["up", stage.name.lower()] += len(reply)
        return reply

    monkeypatch.setattr(secure_round, "reply_of", counted)
    frames = []
    size = secure_round.Inbox._decoded
    monkeypatch.setattr(
        secure_round.Inbox, "_decoded", lambda *a: frames.append(size(*a)[1]) or (size(*a))
    )
    result = train(secure=True, wire="real")
    parts = [record.get("secure", {"uplink": {}, "downlink": {}}) for record in result.history]
    for way, name in (("up", "uplink"), ("down", "downlink")):
        for stage in ("keys", "shares", "masked", "consent", "reveal"):
            total = sum(part[name].get(stage, 0) for part in parts)
            assert total * CLIENTS == pytest.approx(sent[way, stage])
            assert total > 0
    everything = sum(frames) + sum(n for (way, _), n in sent.items() if way == "up")
    assert result.history[-1]["uplink_bytes"] * CLIENTS == pytest.approx(everything)
    clear = train(wire="real")
    broadcasts = clear.history[-1]["downlink_bytes"]
    down = sum(n for (way, _), n in sent.items() if way == "down") / CLIENTS
    assert result.history[-1]["downlink_bytes"] == pytest.approx(broadcasts + down)


def test_a_continued_run_has_the_bits_and_the_bytes_of_an_uninterrupted_one(tmp_path):
    options = {"secure": True, "dropout": 0.15, "seed": 5}
    whole = train(rounds=5, **options)
    first = train(rounds=2, **options)
    second = train(rounds=5, start=first, **options)
    assert_same_bits(whole, second)
    columns = ("secure", "uplink_bytes", "downlink_bytes", "problems")
    for ours, theirs in zip(whole.history, second.history, strict=True):
        assert [ours.get(c) for c in columns] == [theirs.get(c) for c in columns]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": algorithms.sift()}, "the clients of sift send different coordinates"),
        ({"algorithm": algorithms.fedadam_ssm()}, "fedadam-ssm send different coordinates"),
        ({"algorithm": algorithms.fedavg()}, "fedavg send different coordinates or scales"),
        ({"clients": 2}, "needs at least 3 clients per round, got 2"),
        ({"participation": 0.2}, "needs at least 3 clients per round, got 2"),
        ({"secure": SecureSettings(threshold=3)}, "secure_threshold must be from 4 to 7"),
        ({"secure": SecureSettings(neighbors=5)}, "secure_neighbors must be an even number"),
        ({"secure": 1}, "secure must be True, False or SecureSettings"),
        ({"privacy": DifferentialPrivacy(1.0, 1.0)}, r"cannot be private|choose one of the two"),
    ],
)
def test_what_cannot_be_secure_is_refused_in_one_line(options, message):
    with pytest.raises(ValueError, match=message) as problem:
        train(**{"secure": True, **options})
    assert "\n" not in str(problem.value)


def test_averaged_buffers_are_refused_and_others_work():
    data = [client(n) for n in range(4)]
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    method = algorithms.sift_common(density=0.5, local_steps=1, shares=4)
    options = {"algorithm": method, "rounds": 1, "device": "cpu", "progress": False}
    with pytest.raises(ValueError, match="running statistics in the clear"):
        fedsift.simulate(model, data, secure=True, **options)
    result = fedsift.simulate(model, data, secure=True, buffers="local", **options)
    assert result.history[-1]["clients"] == 4


def test_without_the_libraries_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr("fedsift.errors.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install '\.\[secure\]'"):
        train(secure=True)


def run_cli(folder, *words, algorithm="sift-common"):
    common = ["--clients", "5", "--local-steps", "1", "--rounds", "2", "--out", str(folder)]
    return main(["run", "--algorithm", algorithm, *common, *words])


def test_secure_on_the_command_line_and_in_a_config_file(tmp_path):
    assert run_cli(tmp_path / "flags", "--secure", "--secure-threshold", "3") == 0
    folder = RunFolder(tmp_path / "flags")
    assert "secure = true" in folder.config_file.read_text()
    assert folder.history()[-1]["secure"]["uplink"]["reveal"] == 3 + 16
    config = tmp_path / "config.toml"
    config.write_text(folder.config_file.read_text())
    assert main(["run", "--config", str(config), "--out", str(tmp_path / "file")]) == 0
    assert run_cli(tmp_path / "clear") == 0
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("flags", "clear")]
    assert models[0] == models[1]
    compared = [
        "compare",
        "--algorithms",
        "sift-common",
        "--target",
        "0.05",
        "--clients",
        "5",
        "--rounds",
        "1",
    ]
    out = ["--out", str(tmp_path / "compared"), "--secure", "--local-steps", "1"]
    assert main([*compared, *out]) == 0


@pytest.mark.parametrize(
    ("words", "algorithm", "message"),
    [
        ([], "sift", "use sift-common"),
        (["--secure-threshold", "9"], "sift-common", "threshold must be from 3 to 4"),
        (["--participation", "0.4"], "sift-common", "needs at least 3 clients"),
    ],
)
def test_bad_options_are_refused_in_one_line(words, algorithm, message, tmp_path, capsys):
    assert run_cli(tmp_path / "run", "--secure", *words, algorithm=algorithm) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1

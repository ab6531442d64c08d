"""Federations of real processes: bit-identical to simulations, even if processes are killed."""

import json
import os
import signal
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from readme import apply_readme, copy_app
from safetensors.torch import load_file

import fedsift

sys.path.insert(0, str(Path(__file__).parent / "app"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "flower"))
from faulty import task
from link import Link

from fedsift.cli import main
from fedsift.flower.keys import make_node_key
from fedsift.flower.local import free_port
from fedsift.simulation import Options, prepare


def simulated(algorithm, clients, rounds):
    return fedsift.simulate(
        task.make_model(), [task.load_data(n, clients) for n in range(clients)],
        algorithm=task.make_algorithm({"algorithm": algorithm}), rounds=rounds,
        batch_size=task.BATCH, seed=task.SEED, wire="real",
    )  # fmt: skip


def assert_same_bits(folder, state):
    tensors = load_file(folder / "checkpoint.safetensors")
    for name, x in state.items():
        assert torch.equal(tensors[name], x), name


def kill(pid):
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def restart_node(federation, name, key, client):
    """Start a killed SuperNode again. Flower admits it once it has noticed that it was gone."""
    log = federation.log(name)
    log.unlink()
    federation.start_node(name, key, client, 5)

    def is_in():
        if federation.processes[name].poll() is not None:
            federation.start_node(name, key, client, 5)
        return "SuperNode ID" in log.read_text()

    federation.wait_until(is_in, seconds=200)


@pytest.fixture
def slow_link_to():
    """Return a port that passes bytes on to another one at 64 kbit/s each way."""
    links = []

    def start(port):
        links.append(Link(port, rate=64_000))
        return links[-1].port

    yield start
    for link in links:
        link.close()


def test_a_deployment_gives_the_same_bits_as_a_simulation(federation_of, slow_link_to, capsys):
    """Also if the link of a client is slow, others try to get in, and the run is watched."""
    federation, port = federation_of(2), free_port()
    key = federation.register(["far away"])["far away"]
    federation.start_node("far away", key, 2, 3, port=slow_link_to(federation.port))
    federation.start_run(rounds=2, metrics=port)
    intruders = start_intruders(federation)
    assert_can_be_watched(federation, port, capsys)
    log = federation.wait_for_end()
    assert main(["deploy", "status", str(federation.run_folder), "--json"]) == 3
    end = json.loads(capsys.readouterr().out)
    assert (end["phase"], end["round"], end["running"]) == ("finished", 2, False)
    assert "report:" in log
    result = simulated("fedadam-ssm", 3, 2)
    assert_same_bits(federation.run_folder, result.state)
    for real, simulation in zip(federation.history(), result.history[1:], strict=True):
        same = ("round", "clients", "rejected", "train_loss", "uplink_bytes", "uplink_bits_paper")
        assert {k: real[k] for k in same} == {k: simulation[k] for k in same}
    # Requests of round 2 carry the broadcast that the simulation counts in round 1.
    assert federation.history()[1]["downlink_bytes"] == result.history[1]["downlink_bytes"]
    assert (federation.run_folder / "report.html").exists()
    assert_refused(federation, intruders)


def assert_can_be_watched(federation, port, capsys):
    """The status and the metrics of a run in progress agree."""
    seen = {}

    def is_training():
        if not (federation.run_folder / "status.json").exists():
            return False
        code = main(["deploy", "status", str(federation.run_folder), "--json"])
        seen.update(json.loads(capsys.readouterr().out))
        return code == 0 and seen["phase"] == "training"

    federation.wait_until(is_training, "run", seconds=500)
    assert (seen["running"], seen["rounds"]) == (True, 2)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert "fedsift_rounds 2\n" in answer.read().decode()


def start_intruders(federation):
    """Start a SuperNode with an unregistered key, and one without TLS."""
    key = federation.folder / "stranger.key"
    make_node_key(key)
    federation.start_node("stranger", key, 0, 3)
    federation.start(
        "plaintext",
        ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{federation.port}",
         "--max-retries", "1", "--isolation", "process",
         "--host", "127.0.0.1", "--port", str(free_port())],
    )  # fmt: skip
    return [federation.processes[name] for name in ("stranger", "plaintext")]


def assert_refused(federation, intruders):
    federation.wait_until(lambda: all(p.poll() is not None for p in intruders), seconds=200)
    assert all(process.returncode != 0 for process in intruders)
    assert "SuperNode ID" not in federation.log("stranger").read_text()
    assert "SuperNode ID" not in federation.log("plaintext").read_text()
    assert federation.log("superlink").read_text().count("Activated node_id") == 3


def test_a_client_killed_between_masking_and_unmasking_is_in_the_secure_sum(federation_of):
    federation = federation_of(4)
    federation.set_fault(2, 2, "masked")
    federation.start_run(algorithm="sift-common", clients=4, rounds=2, secure=1)
    app = federation.wait_for_note("masked-2-2")
    kill(federation.processes["node-2"].pid)
    kill(app)
    federation.wait_for_end()
    first, second = federation.history()
    assert [(r["clients"], r["problems"]) for r in (first, second)] == [(4, {})] * 2
    assert "secure" not in first  # there are no values before the first mask
    assert second["secure"]["uplink"]["recover"] > 0
    assert_same_bits(federation.run_folder, simulated("sift-common", 4, 2).state)


def test_a_killed_server_resumes_with_the_same_bits(federation_of):
    federation = federation_of(3)
    # sift has memories on clients and server, which makes it the hardest method to resume.
    federation.start_run(algorithm="sift")
    federation.wait_for_note("begun-2-0")
    kill(federation.wait_for_note("server"))  # within round 2
    federation.start_run(algorithm="sift")
    server = federation.wait_for_note("server")
    federation.wait_until(lambda: len(federation.history()) == 2, seconds=500)
    kill(server)  # when round 2 was written
    federation.start_run(algorithm="sift")
    federation.wait_for_end()
    history = federation.history()
    assert [r["round"] for r in history] == [1, 2, 3]
    assert all(r["clients"] == 3 and not r["problems"] for r in history)
    assert_same_bits(federation.run_folder, simulated("sift", 3, 3).state)


def test_a_round_continues_without_failed_clients(federation_of):
    federation = federation_of(5)
    for client, word in enumerate(["raise", "corrupt", "round", "nan"]):
        federation.set_fault(2, client, word)
    federation.set_fault(3, 4, "hang")
    federation.set_fault(4, 3, "hang")
    federation.set_fault(4, 2, "hang")
    federation.start_run(clients=5, rounds=4, hang=3)
    federation.wait_for_note("begun-4-2")
    federation.kill("node-2")  # the whole SuperNode, in the middle of its client's training
    kill(federation.wait_for_note("begun-4-3"))  # only the client's process
    federation.wait_for_end()
    first, bad, hung, killed = federation.history()
    assert (first["clients"], first["problems"]) == (5, {})
    assert (bad["clients"], bad["rejected"]) == (1, 3)
    assert "full of eels" in bad["problems"]["0"]
    assert "checksum" in bad["problems"]["1"]
    assert "wrong round: 1, expected 2" in bad["problems"]["2"]
    assert "finite" in bad["problems"]["3"]
    assert (hung["clients"], set(hung["problems"])) == (4, {"4"})
    assert "no reply within" in hung["problems"]["4"]
    assert killed["clients"] == 3
    assert set(killed["problems"]) == {"2", "3"}

    restart_node(federation, "node-2", federation.folder / "node-2.key", 2)
    federation.start_run(clients=5, rounds=5)
    federation.wait_for_end()
    last = federation.history()[-1]
    assert (last["round"], last["clients"], last["problems"]) == (5, 5, {})


def test_hostile_uploads_affect_only_their_client(federation_of):
    """The third SuperNode tampers with its uploads below Flower's API, each round differently."""
    federation = federation_of(2)
    name, key = "hostile", federation.register(["hostile"])["hostile"]
    federation.start_node(name, key, 2, 3, within=["env", "HOSTILE=1"])
    federation.start_run(rounds=5, hang=5, timeout=100.0)
    assert "report:" in federation.wait_for_end()
    history = federation.history()
    assert [record["clients"] for record in history] == [2] * 5
    problems = [list(record["problems"].values()) for record in history]
    for said, expected in zip(problems, HOSTILE_PROBLEMS, strict=True):
        assert any(expected in problem for problem in said), (said, expected)
    assert_same_bits(federation.run_folder, simulated_without(2, clients=3, rounds=5))
    # In the last round the chunks never arrive. It ends at its timeout with the other updates.
    timeout = float(problems[-1][0].removeprefix("no reply within ").removesuffix(" s"))
    assert history[4]["seconds"] - history[3]["seconds"] < timeout + 5
    growth = int((federation.folder / "growth").read_text()) / 1024
    assert growth < 120, f"the server grew by {growth:.0f} MiB"


HOSTILE_PROBLEMS = [
    "names a message that it was not sent",
    "cannot be read (DecodeError)",
    "arrays are larger than",
    "an object of more than",
    "no reply within",
]


def simulated_without(client, clients, rounds):
    """The state that a simulation reaches if one client's updates are always lost."""
    data = [task.load_data(n, clients) for n in range(clients)]
    without = prepare(
        task.make_model(), data, None, task.make_algorithm({"algorithm": "fedadam-ssm"}),
        Options(batch_size=task.BATCH, participation=1.0, dropout=0.0, min_clients=0, wire="real",
        loss=torch.nn.functional.cross_entropy, seed=task.SEED, device="cpu"),
    )  # fmt: skip
    object.__setattr__(without, "lost_clients", lambda round, cohort: frozenset({client}))
    snapshot = without.initial_snapshot()
    for _ in range(rounds):
        snapshot, _ = without.run_round(snapshot)
    return snapshot.state


def test_the_app_of_the_readme_runs_on_real_processes(federation_of, tmp_path):
    """With two clients instead of ten; they train and evaluate with the app's own functions."""
    apply_readme(app := copy_app(tmp_path))
    server = app / "pytorchapp" / "server_app.py"
    server.write_text(server.read_text().replace("clients=10", "clients=2"))
    federation = federation_of(2)
    federation.run(app, "num-server-rounds=2 local-epochs=1")
    assert "report:" in federation.wait_for_end()
    history = federation.history()
    assert [(record["clients"], record["problems"]) for record in history] == [(2, {})] * 2
    for record in history:
        assert (record["evaluation"]["clients"], record["evaluation"]["problems"]) == (2, {})
        assert 0 <= record["evaluation"]["metrics"]["eval_acc"] <= 1
    assert (federation.folder / "final_model.pt").exists()


def test_too_few_nodes_end_the_run_with_a_clear_message(federation_of, capsys):
    federation = federation_of(0)
    federation.start_run(wait=1.0)
    said = federation.wait_for_end()
    assert "waiting for 3 SuperNodes, 0 connected, 1 s left" in said
    assert "0 of at least 1 SuperNodes are connected after 1 s" in said
    assert main(["deploy", "status", str(federation.run_folder)]) == 3
    assert "TooFewClients" in capsys.readouterr().out

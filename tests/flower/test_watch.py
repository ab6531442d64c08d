"""A run in progress says for whom it waits, and can be watched from other processes."""

import json
import re
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from flwr.app import MetricRecord
from hypothesis import given
from hypothesis import strategies as st
from test_strategy import CLIENTS, Place, start

from fedsift.cli import main
from fedsift.cli import status as cli_status
from fedsift.errors import ConfigError, TooFewClients
from fedsift.flower import exchange, watch
from fedsift.flower.local import free_port
from fedsift.flower.metrics import KINDS, metrics_text, problem_kind
from fedsift.runs import RunConfig, RunFolder
from fedsift.runs.status import Status, read_status, write_status


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(exchange, "POLL_SECONDS", 0.0)


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


@pytest.fixture
def said(monkeypatch, place):
    """Every log line of the watch, with the status on disk at that time."""
    lines = []
    file = place.path / "run" / "status.json"
    monkeypatch.setattr(watch, "WRITE_SECONDS", 0.0)
    monkeypatch.setattr(watch, "LOG_SECONDS", 0.0)
    monkeypatch.setattr(
        watch, "log", lambda level, text, *words: lines.append((text % words, read_status(file)))
    )
    return lines


def test_it_says_for_how_many_nodes_it_waits(place, said):
    grid = place.grid()
    for node in list(grid.nodes.values())[2:]:
        node.is_online = False

    def get_node_ids():
        if len(said) == 3:
            grid.nodes[102].is_online = True
        if len(said) == 6:
            grid.nodes[103].is_online = grid.nodes[104].is_online = True
        return [n for n, node in grid.nodes.items() if node.is_online]

    grid.get_node_ids = get_node_ids
    start(place.strategy(wait=287.0), grid, 1)
    texts = [text for text, _ in said[:6]]
    assert texts[:3] == ["waiting for 5 SuperNodes, 2 connected, 287 s left"] * 3
    assert texts[3:] == ["waiting for 5 SuperNodes, 3 connected, 287 s left"] * 3
    for (_, status), connected in zip(said, [2, 2, 2, 3, 3, 3], strict=False):
        assert (status.phase, status.connected, status.wanted) == ("waiting", connected, 5)
        assert 280 < status.seconds_left(time.time()) <= 287
    assert {status.deadline for _, status in said[:6]} == {said[0][1].deadline}


def test_an_unchanged_wait_is_logged_and_written_only_now_and_then(place, monkeypatch):
    lines, written = [], []
    monkeypatch.setattr(watch, "log", lambda level, text, *words: lines.append(text % words))
    monkeypatch.setattr(watch, "write_status", lambda file, status: written.append(status))
    grid = place.grid()
    grid.nodes[100].is_online = False
    with pytest.raises(TooFewClients):
        start(place.strategy(wait=0.3, min_clients=5), grid, 1)
    assert lines == ["waiting for 5 SuperNodes, 4 connected, 0 s left"]
    assert [status.phase for status in written] == ["starting", "waiting", "stopped"]


def test_it_says_whose_reply_is_missing(place, said):
    grid = place.grid()
    grid.silent = {103}
    start(place.strategy(), grid, 1, timeout=0.2)
    assert said[-1][0] == "waiting for node 103, 4 answered, 0 s left"
    grid.silent = set()
    start(place.strategy(), grid, 2)
    grid.silent = {103, 104}
    said.clear()
    start(place.strategy(), grid, 4, timeout=0.3)  # round 3 finds out who is who
    text, status = said[-1]
    assert re.fullmatch("waiting for node 103, node 104, 3 answered, 0 s left", text)
    assert status.answered == ("client 0", "client 1", "client 2")
    assert status.waiting_for == ("node 103", "node 104")
    assert (status.phase, status.round, status.rounds) == ("training", 3, 4)
    assert status.estimated_end > time.time() - 1


def test_it_counts_the_nodes_with_which_a_round_starts(place, said):
    """Also if it did not have to wait for them."""
    grid = place.grid()
    grid.silent = {103}
    start(place.strategy(), grid, 1, timeout=0.2)
    assert {status.connected for _, status in said} == {5}
    grid.nodes[104].is_online = False
    said.clear()
    start(place.strategy(), grid, 3, timeout=0.2)
    assert said[-1][1].connected == 4


def test_known_clients_are_named_and_malformed_replies_listed(place, said):
    grid = place.grid()
    strategy = place.strategy()

    def evaluate(round, arrays):
        if round == 1:
            grid.silent = {103}
        return MetricRecord({"accuracy": 0.25, "loss": 2.0})

    answer = grid.answer

    def tampered(node, node_id, message):
        reply = answer(node, node_id, message)
        if node_id == 101 and 103 in grid.silent:
            reply.metadata.__dict__["_reply_to_message_id"] = "another"
        return reply

    grid.answer = tampered
    start(strategy, grid, 2, timeout=0.3, evaluate_fn=evaluate)
    text, status = said[-1]
    assert text.startswith("waiting for client 3, 3 answered")
    assert status.waiting_for == ("client 3",)
    assert status.answered == ("client 0", "client 2", "client 4")
    assert status.dropped == {"client 1": "its reply names a message that it was not sent"}
    end = read_status(place.path / "run" / "status.json")
    assert end.dropped["client 3"] == "no reply within 0.3 s"
    assert (end.phase, end.merged, end.accuracy, end.loss) == ("finished", 3, 0.25, 2.0)
    assert end.uplink_bytes == place.history()[-1]["uplink_bytes"]
    assert end.estimated_end is None


def test_a_run_that_fails_says_why(place):
    with pytest.raises(TooFewClients):
        start(place.strategy(wait=0.0), place.grid(clients=0), 1)
    status = read_status(place.path / "run" / "status.json")
    assert status.phase == "stopped"
    assert status.reason.startswith("TooFewClients: 0 of at least 1 SuperNodes are connected")


def test_a_full_disk_does_not_stop_the_run_because_of_its_status(place, monkeypatch):
    def full(*words):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedsift.runs.status.os.replace", full)
    write_status(place.path / "status.json", Status())
    assert not (place.path / "status.json").exists()


def test_a_reader_never_sees_half_a_status(tmp_path):
    file, stop = tmp_path / "status.json", threading.Event()
    write_status(file, Status())

    def write():
        for n in range(10**6):
            write_status(file, Status(answered=tuple(map(str, range(n % 50)))))
            if stop.is_set():
                return

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(300):
            read_status(file)
    finally:
        stop.set()
        writer.join()


@pytest.mark.parametrize(
    "change",
    [{"round": "1"}, {"round": None}, {"answered": 1}, {"answered": [1]}, {"dropped": []},
     {"accuracy": "high"}, {"extra": 1}, {"phase": 3}, {"updated": True}],
    ids=str,
)  # fmt: skip
def test_a_damaged_status_is_refused_in_one_line(change, tmp_path):
    file = tmp_path / "status.json"
    write_status(file, Status())
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ConfigError, match="is damaged") as refused:
        read_status(file)
    assert "\n" not in str(refused.value)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_status_or_refused(content):
    file = Path("/tmp") / f"status-{threading.get_ident()}.json"
    file.write_bytes(content)
    try:
        with pytest.raises(ConfigError, match="is damaged"):
            read_status(file)
    finally:
        file.unlink()


STATUS = Status(
    phase="training", round=3, rounds=20, answered=("client 0", "client 2"),
    waiting_for=("client 1",), dropped={"client 4": "[red]no reply within 60 s"}, merged=4,
    rejected=1, accuracy=0.875, uplink_bytes=1234567.0, downlink_bytes=4321.0,
)  # fmt: skip


@pytest.fixture
def running(tmp_path):
    """The folder of a run in progress."""
    folder = RunFolder.create(tmp_path / "run", RunConfig.from_values({"wire": "flower"}))
    now = time.time()
    status = replace(STATUS, deadline=now + 42.5, estimated_end=now + 600, updated=now)
    with folder.locked():
        write_status(folder.status_file, status)
        yield folder


def test_the_status_of_a_run_in_progress(running, capsys):
    assert main(["deploy", "status", str(running.path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for text in (
        "run: training", "3 of 20 finished", "4 merged, 1 rejected", "87.50 %", "1.23 MB", "4.3 kB",
        "answered client 0, client 2", "waiting for client 1, 42 s left", "estimated end",
        "dropped client 4: [red]no reply within 60 s",
    ):  # fmt: skip
        assert text in shown, text
    assert main(["deploy", "status", str(running.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["running"] is True
    assert 40 < found["seconds_left"] < 43
    assert found["dropped"] == {"client 4": "[red]no reply within 60 s"}
    write_status(
        running.status_file, Status(phase="waiting", connected=2, wanted=4, deadline=2e9, rounds=5)
    )
    assert main(["deploy", "status", str(running.path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "waiting for SuperNodes" in shown
    assert "2 of 4 connected" in shown


def test_the_exit_code_tells_whether_a_run_is_in_progress(running, capsys):
    words = ["deploy", "status", str(running.path)]
    running.lock_file.unlink()  # as if its process had ended
    assert main(words) == 3
    assert "it was killed" in capsys.readouterr().out
    for phase in ("finished", "stopped"):
        write_status(running.status_file, replace(STATUS, phase=phase, reason="no space left"))
        assert main(words) == 3
        assert f": {phase}" in " ".join(capsys.readouterr().out.split())
    running.status_file.unlink()
    assert main(words) == 2
    assert "only runs on Flower write it" in capsys.readouterr().err


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_watching_ends_with_the_run(words, running, capsys, monkeypatch):
    looks = iter(range(3))

    def sleep(seconds):
        assert seconds == cli_status.WATCH_SECONDS
        if next(looks) == 1:
            running.lock_file.unlink()
            write_status(running.status_file, replace(STATUS, phase="finished", round=20))

    monkeypatch.setattr(cli_status.time, "sleep", sleep)
    assert main(["deploy", "status", str(running.path), "--watch", *words]) == 3
    shown = capsys.readouterr().out
    assert next(looks) == 2
    if words:
        assert [json.loads(line)["running"] for line in shown.splitlines()] == [True, True, False]
    else:
        assert "20 of 20 finished" in shown


def test_looking_at_a_folder_does_not_keep_a_run_from_starting(tmp_path):
    folder = RunFolder.create(tmp_path / "run", RunConfig.from_values({}))
    assert not folder.is_in_use()
    stop = threading.Event()

    def look():
        while not stop.is_set():
            folder.is_in_use()

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(200):
            with folder.locked():
                assert folder.is_in_use()
    finally:
        stop.set()
        looking.join()


SAMPLE = re.compile(r'(fedsift_\w+)(?:\{problem="([\w ]+)"\})? (\S+)')


def scraped(port):
    """Read and parse the metrics of a server."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        lines = answer.read().decode().splitlines()
    samples = [SAMPLE.fullmatch(line).groups() for line in lines if not line.startswith("#")]
    declared = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    assert declared == {line.split()[2] for line in lines if line.startswith("# HELP")}
    assert {name for name, *_ in samples} <= declared
    return {(name, label): float(value) for name, label, value in samples}


def test_prometheus_reads_the_metrics_on_this_machine_only(place):
    port, seen = free_port(), []
    grid = place.grid()
    grid.silent = {104}

    def evaluate(round, arrays):
        if round == 2:
            seen.append(scraped(port))
            seen.append(Path("/proc/net/tcp").read_text())
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5)
        return MetricRecord({"accuracy": 0.5, "loss": 1.5})

    start(place.strategy(metrics_port=port), grid, 2, timeout=0.2, evaluate_fn=evaluate)
    found, listening = seen
    first = place.history()[0]
    assert {name: value for (name, label), value in found.items() if not label} == {
        "fedsift_round": 1, "fedsift_rounds": 2, "fedsift_supernodes_connected": 5,
        "fedsift_clients_waiting": 1, "fedsift_merged_updates_total": 4,
        "fedsift_rejected_updates_total": 0, "fedsift_accuracy": 0.5, "fedsift_loss": 1.5,
        "fedsift_train_loss": first["train_loss"], "fedsift_round_seconds": first["seconds"],
        "fedsift_uplink_bytes_total": CLIENTS * first["uplink_bytes"],
        "fedsift_downlink_bytes_total": CLIENTS * first["downlink_bytes"],
    }  # fmt: skip
    assert found["fedsift_problems_total", "timeout"] == 1
    assert f"0100007F:{port:04X} 00000000:0000 0A" in listening  # 127.0.0.1
    assert f"00000000:{port:04X} 00000000:0000 0A" not in listening
    with pytest.raises(urllib.error.URLError):
        scraped(port)  # it ends with the run


def test_there_is_no_server_by_default(place):
    before = threading.active_count()
    during = []
    start(place.strategy(), place.grid(), 1, evaluate_fn=lambda *_: during.append(
        threading.active_count()))  # fmt: skip
    assert set(during) == {before}


def test_a_port_that_is_taken_is_refused_before_training(place):
    port = free_port()
    with (
        watch_port(port),
        pytest.raises(ConfigError, match=f"127.0.0.1:{port} .*choose another"),
    ):
        start(place.strategy(metrics_port=port), place.grid(), 1)
    assert not (place.path / "run" / "metrics.jsonl").exists() or not place.history()


def watch_port(port):
    from fedsift.flower.metrics import metrics_server

    return metrics_server(port, lambda: "")


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_an_invalid_port_is_refused(port, place):
    with pytest.raises(ValueError, match="metrics_port must be from 1 to 65535"):
        place.strategy(metrics_port=port)


@given(st.text())
def test_clients_cannot_choose_labels(text):
    assert problem_kind(text) in {*KINDS.values(), "other"}
    record = {"round": 1, "clients": 1, "rejected": 0, "problems": {"0": text}}
    lines = metrics_text(Status(), [record], 1).splitlines()
    assert all(line.startswith("#") or SAMPLE.fullmatch(line) for line in lines)


def test_the_report_updates_during_the_run(place, monkeypatch):
    monkeypatch.setattr(watch, "REPORT_SECONDS", 0.001)
    seen = []
    report = place.path / "run" / "report.html"

    def evaluate(round, arrays):
        seen.append(report.read_text() if report.exists() else "")
        return MetricRecord({"accuracy": 0.5})

    monkeypatch.setattr(watch, "RELOAD_SECONDS", 15)
    start(place.strategy(), place.grid(), 2, evaluate_fn=evaluate)
    assert seen[:2] == ["", ""]
    assert '<meta http-equiv="refresh" content="15">' in seen[2]
    assert "reloads every 15 s" in seen[2]
    assert "http-equiv" not in report.read_text()
    assert "In progress" not in report.read_text()


def test_reports_take_at_most_a_share_of_the_time(place, monkeypatch):
    clock, written = [0.0], []

    def report_on(*words, **named):
        clock[0] += 3.0  # seconds
        written.append(clock[0])

    monkeypatch.setattr(watch, "report_on", report_on)
    monkeypatch.setattr(watch.time, "monotonic", lambda: clock[0])
    run = watch.RunWatch(RunFolder.create(place.path / "run", RunConfig.from_values({})), 99, [])
    record = {"round": 1, "clients": 1, "accuracy": None, "loss": None, "uplink_bytes": 0,
              "downlink_bytes": 0, "seconds": 1.0}  # fmt: skip
    for _ in range(200):
        clock[0] += 1.0
        run.round_finished(record, None)
    assert written == [18.0, 78.0, 138.0, 198.0]

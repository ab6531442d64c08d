"""Many rounds of a federation of real processes, with faults: ``soak.py ROUNDS [--seed SEED]``.

A SuperLink with TLS and three SuperNodes with keys train with ``sift``, which has memories on
clients and server. Faults are drawn from the seed, several in a round of ten:

- client processes that are killed, or stopped for a while; SuperNodes that are killed or stopped
- the ServerApp killed (-9) within a round, the SuperLink killed (-9), and both restarted
- uploads of random bytes, of an earlier round, and with NaN; random bytes on the SuperLink's port
- clocks of clients and of the SuperLink that jump by up to an hour, the latter for three seconds

A client whose update does not count in a round, for whatever reason, is in that round's
``problems``. At the end a simulation runs the same rounds, in which exactly these updates are lost,
and must reach the same global state, bit by bit. Memory, open files and disk of the processes must
not grow. The last line of the output sums it up, and ``--out`` adds it to a file.

To spend the time on faults instead of on waiting, SuperNodes ask for messages every 0.8 s instead
of every 3 s, and heartbeats come every 8 s instead of every 30 s (``fast/sitecustomize.py``). A
round waits for a client for 10 s. ``TMPDIR=/dev/shm`` keeps the federation's files in memory.
SIGTERM ends the soak after the current round, with the result of all rounds until then. With
``--folder FOLDER`` the federation's files are kept, and the same command continues after the last
round, as after a power cut: with new processes, keys and a new SuperLink. The model is compared
over all rounds. What is counted belongs to the rounds of this part.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "app"), str(HERE.parent)]
from faulty import task  # noqa: E402
from processes import SOURCE, Federation, processes_of  # noqa: E402
from usage import Usage  # noqa: E402

from fedsift.flower.local import EXECUTOR  # noqa: E402
from fedsift.runs.disk import load_tensors  # noqa: E402
from fedsift.runs.run import commit  # noqa: E402
from fedsift.simulation import Options, prepare  # noqa: E402

CLIENTS, ALGORITHM = 3, "sift"
TIMEOUT = 10.0
"""Seconds after which a round continues without a client."""
HEARTBEAT = 8
"""Seconds between two heartbeats. A process that misses two is gone."""
POLL = 0.8
"""Seconds after which SuperNodes ask for messages, and their SuperExecs for work, at the latest."""
REFUSALS = 4
"""A SuperNode that the SuperLink refuses this many times gets a new key."""
CLOCK, CLOCK_SECONDS = "clock", 3.0
"""The SuperLink's clock is wrong for this long."""
CLIENT_FAULTS = {
    "raise": 4, "corrupt": 4, "round": 4, "nan": 4, "garbage": 4, "replay": 6,
    "clock 30": 3, "clock -30": 3, "clock 3600": 2, "clock -3600": 2, "pause": 4, "hang": 3,
}  # fmt: skip
"""What goes wrong in a client's process, and how often relative to the others."""
EVENTS = {
    "stop node": 4, "stop superlink": 2, "noise": 4, "kill node": 2, "kill server": 2,
    "kill superlink": 1, "clock superlink": 2,
}  # fmt: skip
"""What goes wrong elsewhere."""
CLIENT_RATE, EVENT_RATE = 0.25, 0.2
"""The chance of a fault of a client, and of another fault, in each round."""


@dataclass
class Soak:
    """A federation, and what goes wrong in it.

    ``client_faults`` has the round, the client and the name of what went wrong on clients, and
    ``done`` names what went wrong elsewhere. ``down`` is when SuperNodes were found dead.
    """

    federation: Federation
    rounds: int
    seed: int
    heartbeat: int = HEARTBEAT
    done: list[str] = field(default_factory=list)
    client_faults: list[tuple[int, int, str]] = field(default_factory=list)
    restarts: int = 0
    node_restarts: int = 0
    registrations: int = 0
    down: dict[str, float] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)

    def __post_init__(self) -> None:
        self.draw, self.last = random.Random(self.seed), self.rounds + 1
        self.faults = {n: list(self.faults_of(n)) for n in range(2, self.rounds + 1)}
        self.events = {n: self.event_of() for n in range(2, self.rounds + 1)}

    def faults_of(self, round: int) -> Iterator[tuple[int, str]]:
        """At most two of the three clients fail in a round."""
        for client in self.draw.sample(range(CLIENTS), 2):
            if self.draw.random() < CLIENT_RATE:
                yield client, self.draw.choices([*CLIENT_FAULTS], [*CLIENT_FAULTS.values()])[0]

    def event_of(self) -> str:
        if self.draw.random() >= EVENT_RATE:
            return ""
        return self.draw.choices([*EVENTS], [*EVENTS.values()])[0]

    def run(self) -> None:
        """Run all rounds, restarting what was killed."""
        self.start()
        finished, seen = False, 0
        while not finished:
            if (number := self.rounds_done()) > seen:
                seen = number
                self.usage.add(self.federation)
                self.tidy()
                self.report(seen)
            self.restart_nodes()
            self.restart_superexec()
            if seen < self.rounds:
                self.disturb(seen + 1)
            ended = self.federation.processes["run"].poll() is not None
            finished = ended and self.rounds_done() == self.rounds
            finished |= seen >= self.last
            if ended and not finished:
                self.restarts += 1
                self.start()
            time.sleep(0.05)

    def stop_soon(self, *_: object) -> None:
        """End after the current round."""
        self.last = self.rounds_done() + 1

    def rounds_done(self) -> int:
        """The number of rounds in the run's metrics."""
        with suppress(FileNotFoundError):
            return (self.federation.run_folder / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    def start(self) -> None:
        """Start the run, or continue it."""
        settings = {"clients": CLIENTS, "algorithm": ALGORITHM, "timeout": TIMEOUT}
        self.federation.start_run(rounds=self.rounds, hang=0, **settings)

    def report(self, round: int) -> None:
        """Say now and then how far it is."""
        if round % 50 == 0:
            faults, memory = len(self.done) + len(self.client_faults), self.usage.memory[-1] >> 20
            about = f"round {round}: {faults} faults, {self.restarts} restarts, {memory} MiB"
            print(time.strftime("%H:%M:%S"), about, file=sys.stderr, flush=True)

    def restart_nodes(self) -> None:
        """Start SuperNodes that have ended, as a service manager does.

        The SuperLink refuses them until it has missed the heartbeats of their predecessors.
        """
        for n in range(CLIENTS):
            name, process = f"node-{n}", self.federation.processes.get(f"node-{n}")
            if process is not None and process.poll() is None:
                continue
            if process is not None:
                self.federation.kill(name)  # with its SuperExec
            self.down.setdefault(name, time.monotonic())
            if time.monotonic() - self.down[name] > 2 * self.heartbeat + 1:
                self.node_restarts += 1
                self.register_if_refused(name)
                key = self.federation.folder / f"{name}.key"
                self.federation.start_node(name, key, n, CLIENTS)
                del self.down[name]

    def register_if_refused(self, name: str) -> None:
        """Do what an operator does if the SuperLink refuses a SuperNode: give it a new key.

        A heartbeat that arrives while the SuperLink's clock is an hour ahead keeps its SuperNode
        connected for that hour in the eyes of the SuperLink, and no other may have its key.
        """
        before, _, since = self.federation.log(name).read_text().rpartition("SuperNode ID: ")
        if before and since.count("Exit Code: 305") >= REFUSALS:
            self.registrations += 1
            self.federation.flwr("supernode", "unregister", since.split()[0], "demo")
            self.federation.log(name).unlink()
            self.federation.register([name])

    def restart_superexec(self) -> None:
        """Start the SuperLink's SuperExec again. Flower ends it if the SuperLink refuses it."""
        if self.federation.processes[f"superlink{EXECUTOR}"].poll() is not None:
            self.federation.start_superlink_executor()

    def tidy(self) -> None:
        """Remove the notes and faults of finished rounds, which are the test's own."""
        for path in [*self.federation.folder.glob("notes/begun-*"),
                     *self.federation.folder.glob("faults/*")]:  # fmt: skip
            words = path.name.removeprefix("begun-").split("-")
            if int(words[0]) <= self.rounds_done():
                path.unlink(missing_ok=True)

    def disturb(self, round: int) -> None:
        """Cause what is planned for a round, each fault once."""
        self.set_faults(round)
        self.set_faults(round + 1)  # before it begins
        for client, word in list(self.faults.get(-round, ())):
            if word in ("hang", "pause") and (pid := self.begun(round, client)):
                self.faults[-round].remove((client, word))
                self.kill(pid) if word == "hang" else self.stop(pid)
        if self.events.get(round) and any(self.begun(round, n) for n in range(CLIENTS)):
            event = self.events.pop(round)
            self.done.append(event)
            getattr(self, event.replace(" ", "_"))()

    def set_faults(self, round: int) -> None:
        """Let clients fail in a round as planned."""
        for client, word in self.faults.pop(round, ()):
            self.federation.set_fault(round, client, word)
            self.client_faults.append((round, client, word))
            self.faults.setdefault(-round, []).append((client, word))

    def happened(self, history: list[dict[str, Any]]) -> dict[str, object]:
        """What went wrong and how often, and to which of a client's faults its update was lost."""
        problems = {record["round"]: record["problems"] for record in history}
        faults = [fault for fault in self.client_faults if fault[0] in problems]
        lost = [word for round, client, word in faults if str(client) in problems[round]]
        times = Counter([*self.done, *(word for *_, word in faults)])
        return {
            "faults": dict(sorted(times.items())),
            "lost to": dict(sorted(Counter(lost).items())),
        }

    def begun(self, round: int, client: int) -> int | None:
        """The process of a client that has begun a round."""
        path = self.federation.folder / "notes" / f"begun-{round}-{client}"
        with suppress(FileNotFoundError):
            return int(path.read_text())
        return None

    def kill(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def stop(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(self.draw.uniform(0.5, 2))
            os.kill(pid, signal.SIGCONT)

    def stop_node(self) -> None:
        self.stop(self.federation.processes[f"node-{self.draw.randrange(CLIENTS)}"].pid)

    def kill_node(self) -> None:
        """Kill a SuperNode, its SuperExec and its client; it is started again."""
        self.federation.kill(f"node-{self.draw.randrange(CLIENTS)}")

    def clock_superlink(self) -> None:
        """Let the SuperLink's clock be wrong for a while."""
        clock = self.federation.folder / CLOCK
        clock.write_text(self.draw.choice(["30", "-30", "3600", "-3600"]))
        time.sleep(CLOCK_SECONDS)
        clock.unlink()

    def stop_superlink(self) -> None:
        self.stop(self.federation.processes["superlink"].pid)

    def noise(self) -> None:
        """Send random bytes to the SuperLink's port, and leave a connection that says nothing."""
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.federation.port)) as s:
            s.sendall(self.draw.randbytes(5000))
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.federation.port)):
            time.sleep(0.5)

    def kill_server(self) -> None:
        """Kill the ServerApp; the loop in :meth:`run` starts it again."""
        self.kill(int((self.federation.folder / "notes" / "server").read_text()))

    def kill_superlink(self) -> None:
        """Kill the SuperLink and the ServerApp with it, and start it again on the same port."""
        self.kill_server()
        self.federation.kill("superlink", "run")
        self.federation.start_superlink()
        self.start()


def simulated(history: list[dict[str, object]]) -> dict[str, torch.Tensor]:
    """The state that a simulation reaches in which the same clients' updates are lost."""
    lost = {r["round"]: frozenset(int(n) for n in r["problems"] if n.isdigit()) for r in history}
    data = [task.load_data(n, CLIENTS) for n in range(CLIENTS)]
    without = prepare(
        task.make_model(), data, None, task.make_algorithm({"algorithm": ALGORITHM}),
        Options(batch_size=task.BATCH, participation=1.0, dropout=0.0, min_clients=0, wire="real",
        loss=torch.nn.functional.cross_entropy, seed=task.SEED, device="cpu"),
    )  # fmt: skip
    object.__setattr__(without, "lost_clients", lambda round, cohort: lost[round])
    snapshot = without.initial_snapshot()
    for record in history:
        snapshot, report = without.run_round(snapshot)
        if report.clients != record["clients"]:
            raise AssertionError(f"round {record['round']} merged {record['clients']} updates, "
                                 f"the simulation {report.clients}")  # fmt: skip
    return dict(snapshot.state.items())


def soak(
    rounds: int,
    seed: int,
    folder: Path,
    kind: type[Federation] = Federation,
    heartbeat: int = HEARTBEAT,
) -> dict[str, object]:
    """Run the federation; return what happened, and raise AssertionError if it should not have."""
    began = time.monotonic()
    env = {
        "PYTHONPATH": os.pathsep.join([str(HERE / "fast"), SOURCE]), "OMP_NUM_THREADS": "1",
        "HEARTBEAT": str(heartbeat), "POLL": str(POLL), "CLOCK": str(folder / CLOCK),
    }  # fmt: skip
    with kind(folder, env) as federation:
        keys = federation.register([f"node-{n}" for n in range(CLIENTS)])
        for n, (name, key) in enumerate(keys.items()):
            federation.start_node(name, key, n, CLIENTS)
        run = Soak(federation, rounds, seed, heartbeat)
        before = run.rounds_done()
        ended_by = signal.signal(signal.SIGTERM, run.stop_soon)
        run.run()
        signal.signal(signal.SIGTERM, ended_by)
    about, tensors = load_tensors(federation.run_folder / "checkpoint.safetensors", "cpu")
    history = federation.history()[: about["round"]]
    same = all(torch.equal(tensors[name], x) for name, x in simulated(history).items())
    return {
        "rounds": len(history), "of them in this part": len(history) - before, "seed": seed,
        "seconds": round(time.monotonic() - began),
        **run.happened(history),
        "restarts of the run": run.restarts, "restarts of SuperNodes": run.node_restarts,
        "new keys of SuperNodes": run.registrations,
        "updates": sum(r["clients"] for r in history[before:]),
        "lost or refused": sum(len(r["problems"]) for r in history[before:]),
        "same bits": same,
        **run.usage.summary(), "processes left": len(processes_of(federation.home)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("rounds", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    load, code = os.getloadavg()[0], commit()
    with tempfile.TemporaryDirectory() as folder:
        found = soak(options.rounds, options.seed, options.folder or Path(folder))
    found["load average"] = [load, os.getloadavg()[0]]
    print(json.dumps(found))
    if options.out:
        command = f"tests/flower/soak.py {options.rounds} --seed {options.seed}"
        found |= {"command": command, "commit": code, "flwr": version("flwr"),
                  "torch": torch.__version__, "cores": os.cpu_count()}  # fmt: skip
        is_first = found["rounds"] == found["of them in this part"]
        parts = [] if is_first else json.loads(options.out.read_text())["parts"]
        options.out.write_text(json.dumps({"parts": [*parts, found]}, indent=2) + "\n")
    sys.exit(not found["same bits"])


if __name__ == "__main__":
    main()

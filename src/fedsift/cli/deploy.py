"""``fedsift deploy demo``: a whole federation of real processes on this machine, start to end."""

from __future__ import annotations

import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from fedsift.cli.running import told_how_to_go_on
from fedsift.cli.terminal import bar, err, out, say_where, summary_table
from fedsift.data.folder import data_folder
from fedsift.flower.demo import write_app
from fedsift.flower.local import LocalFederation, ProcessFailed
from fedsift.runs.config import RunConfig
from fedsift.runs.folder import RunFolder

COMPLETED = "finished:completed"
HOURS = 3600.0


def deploy_demo(config: RunConfig, folder: RunFolder) -> None:
    """Start the federation, run, show how it goes, and end every process again."""
    env = {"FEDSIFT_DATA": str(data_folder().absolute())}  # they work in another folder
    again = "the same command with --out " + shlex.quote(str(folder.path))
    federation = LocalFederation(folder.path / "federation", env)
    with told_how_to_go_on(folder, again), ended_politely(), federation:
        err.print(f"SuperLink at 127.0.0.1:{federation.port}, with TLS and node keys")
        names = [f"node-{n}" for n in range(config.clients)]
        for n, (name, key) in enumerate(federation.register(names).items()):
            federation.start_node(name, key, n, config.clients)
        err.print(f"{config.clients} SuperNodes, each with a registered key")
        app = federation.folder / "app"
        shutil.rmtree(app, ignore_errors=True)
        write_app(app, config, folder.path)
        federation.run(app)
        follow(federation, folder, config)
        statuses = federation.statuses()  # Flower's process ends with 0 also where its run failed
    if statuses != [COMPLETED]:
        raise ProcessFailed(reason(federation))
    out.print(summary_table(folder.summary()))
    say_where("report", folder.path / "report.html")


def follow(federation: LocalFederation, folder: RunFolder, config: RunConfig) -> None:
    """A progress bar until the run ends."""
    with bar(config) as step:
        seen = 0

        def has_ended() -> bool:
            nonlocal seen
            history = folder.history()
            for record in history[seen:]:
                step(record)
            seen = len(history)
            return federation.processes["run"].poll() is not None

        federation.wait_until(has_ended, "superlink", seconds=24 * HOURS)


def reason(federation: LocalFederation) -> str:
    """Why a run has failed, from its log."""
    log = federation.log("run")
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    errors = [line for line in lines if ("Error" in line or "TooFew" in line) and ": " in line]
    return f"the run failed ({errors[-1] if errors else 'no reason given'}): see {log}"


@contextmanager
def ended_politely() -> Iterator[None]:
    """Inside, a SIGTERM leaves as Ctrl-C does: not without ending what was started."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

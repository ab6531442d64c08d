"""A real federation behind links that count, and may be slow; used by bytes.py and slow_link.py."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

import flwr.supercore.version
import torch
from check import check
from link import Link
from veth import Veth, veth

import fedsift
from fedsift.flower.local import LocalFederation, free_port
from fedsift.runs.run import commit
from fedsift.runs.sigterm import exit_on_sigterm

HERE = Path(__file__).parent
sys.path.append(str(HERE / "app"))
HOUR = 3600.0
CHUNK_BYTES = 2**19
"""Flower's requests end after 30 s. Its own 5 MiB a request would need 1.4 Mbit/s."""


@dataclass
class Measured:
    notes: list[dict[str, float]]
    history: list[dict[str, float]]
    up: list[int]
    down: list[int]
    idle_up: list[int]
    idle_down: list[int]
    links: str
    checks: list[dict[str, float]]


def measure(clients: int, rate: float | None, **settings: object) -> Measured:
    """Run the benchmark's app once; return the bytes of each client's link, and those before it."""
    folder = Path(mkdtemp(prefix="fedsift-race-"))
    source = str(Path(fedsift.__file__).parents[1])
    env = {"PYTHONPATH": source, "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE": str(CHUNK_BYTES)}
    with ExitStack() as stack:
        stack.enter_context(exit_on_sigterm())
        links = stack.enter_context(open_links(clients, rate, port := free_port()))
        checks = [check(link, port) for link in links] if rate else []
        federation = LocalFederation(folder, env, port, address=links[0].host)
        stack.enter_context(federation)
        names = [f"node-{n}" for n in range(clients)]
        for n, (name, key) in enumerate(federation.register(names).items()):
            federation.start_node(name, key, n, clients, links[n].port, links[n].within)
        federation.wait_until(lambda: all("SuperNode ID" in read(federation, n) for n in names))
        idle = [link.up for link in links], [link.down for link in links]
        words = {"folder": str(folder), "clients": clients, **settings}
        federation.run(HERE / "app", " ".join(f"{k}={json.dumps(v)}" for k, v in words.items()))
        federation.wait_until((folder / "done").exists, "run", seconds=HOUR)
        total = [link.up for link in links], [link.down for link in links]
    notes = json.loads((folder / "notes.json").read_text())
    metrics = folder / "run" / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    shutil.rmtree(folder)
    return Measured(
        notes, [json.loads(line) for line in lines], *total, *idle, links[0].kind, checks
    )


@contextmanager
def open_links(clients: int, rate: float | None, port: int) -> Iterator[Sequence[Link | Veth]]:
    """A link for each client to that port; where the kernel's are not allowed, proxies."""
    with ExitStack() as stack:
        links: list[Veth] = []
        try:
            if rate:
                links = [stack.enter_context(veth(n, port, rate)) for n in range(clients)]
        except OSError as why:
            print(f"the links are proxies: {why}", flush=True)
        yield links or [stack.enter_context(closing(Link(port, rate))) for _ in range(clients)]


def read(federation: LocalFederation, name: str) -> str:
    return federation.log(name).read_text(errors="replace")


def environment() -> dict[str, str]:
    return {
        "fedsift": fedsift.__version__,
        "commit": commit(),
        "flwr": flwr.supercore.version.package_version,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"cpu ({os.cpu_count()} cores)",
        "command": "python " + " ".join(sys.argv),
    }


def write(name: str, content: dict[str, object]) -> None:
    """Write a result next to the others, with what it depends on."""
    path = HERE / "results" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**content, "environment": environment()}, indent=2) + "\n")
    print(path)

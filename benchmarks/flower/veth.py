"""A slow link by the kernel: a client's network namespace, and a veth pair with tbf at both ends.

What it counts is what a cable would carry: Ethernet, IP and TCP headers, acknowledgements and
what is sent again. It needs root, ``ip`` and ``tc``.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SERVER = "198.18.0.1"
"""The server's end of every link; a network that is reserved for benchmarks (RFC 2544)."""
CLIENT = "198.18.0.{}"
BUCKET = "burst 2kb latency 200ms"
"""A burst of one packet, so that the rate holds from the first on, and a queue of 200 ms."""


@dataclass(frozen=True)
class Veth:
    """The server's end of a link; the namespace at the other end has the same name."""

    name: str
    port: int
    host: str = SERVER
    kind: str = f"veth pairs to network namespaces, tbf {BUCKET}"

    @property
    def within(self) -> tuple[str, ...]:
        """What to put before a command, for it to run at the client's end."""
        return ("ip", "netns", "exec", self.name)

    @property
    def up(self) -> int:
        return self._count("rx")

    @property
    def down(self) -> int:
        return self._count("tx")

    def _count(self, way: str) -> int:
        return int(Path(f"/sys/class/net/{self.name}/statistics/{way}_bytes").read_text())


@contextmanager
def veth(n: int, port: int, rate: float) -> Iterator[Veth]:
    """Client n's link to that port of the server; it and the namespace go at the end."""
    name, client, limit = f"fedsift-{n}", CLIENT.format(n + 2), f"rate {rate:.0f}bit {BUCKET}"
    say(f"ip netns add {name}")
    try:
        say(f"ip link add {name} type veth peer name {name} netns {name}")
        say(f"ip address add {SERVER} peer {client} dev {name}")
        say(f"ip -n {name} address add {client} peer {SERVER} dev {name}")
        say(f"ip link set {name} up")
        say(f"ip -n {name} link set {name} up")
        say(f"ip -n {name} link set lo up")
        say(f"tc qdisc add dev {name} root tbf {limit}")
        say(f"tc -n {name} qdisc add dev {name} root tbf {limit}")
        yield Veth(name, port)
    finally:
        subprocess.run(["ip", "link", "delete", name], stderr=subprocess.DEVNULL)
        say(f"ip netns delete {name}")


def say(line: str) -> None:
    """Carry out a command; where it cannot be, an OSError says why."""
    done = subprocess.run(line.split(), capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{line}: {done.stderr.strip()}")

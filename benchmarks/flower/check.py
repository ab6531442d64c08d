"""How fast a link really is: 256 KiB each way, before the federation starts."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from subprocess import Popen

from link import Link
from veth import Veth

SIZE = 2**18
SECONDS = 60


def check(link: Link | Veth, port: int) -> dict[str, float]:
    """Bits a second each way as a program meets them: without headers."""
    words = [*link.within, sys.executable, __file__, link.host, str(link.port)]
    with socket.create_server((link.host, port)) as listener, Popen(words) as far:
        try:
            listener.settimeout(SECONDS)
            near, _ = listener.accept()
            with near:
                near.settimeout(SECONDS)
                up = speed(lambda: exchange(near, 1, SIZE))
                return {"up": up, "down": speed(lambda: exchange(near, SIZE, 1))}
        finally:
            far.kill()


def speed(work: Callable[[], None]) -> float:
    began = time.monotonic()
    work()
    return round(8 * SIZE / (time.monotonic() - began))


def exchange(with_: socket.socket, send: int, receive: int) -> None:
    """Send this many bytes, then wait for this many."""
    with_.sendall(bytes(send))
    while receive:
        got = len(with_.recv(min(receive, 2**16)))
        if not got:
            raise ConnectionError("the other end of the link is gone")
        receive -= got


def far_end(host: str, port: str) -> None:
    """What runs at the client's end."""
    with socket.create_connection((host, int(port)), SECONDS) as near:
        exchange(near, 0, 1)
        exchange(near, SIZE, SIZE)
        exchange(near, 1, 0)


if __name__ == "__main__":
    far_end(*sys.argv[1:])

"""The cost of secure aggregation: seconds of clients and server by stage, and bytes by stage.

    python benchmarks/secure_aggregation.py --out benchmarks/results/secure_aggregation.json

Seconds are CPU seconds on one core, of a round of 100 clients with what sift-common sends at
d = 10**7 and a density of 2 %: 240,000 codes from -6 to 6. They are given for the first round,
which also makes keys and shares, and for later ones: without losses, with 10 clients lost before
their masked values arrive, and with 10 lost after. Bytes depend on numbers only, not on values.
"""

import argparse
import json
import platform
import time
from collections import Counter
from pathlib import Path

import numpy as np

from fedsift.privacy.secure import SecureSettings
from fedsift.privacy.secure.client import SecureClient
from fedsift.privacy.secure.exchange import StageBytes, reply_of
from fedsift.privacy.secure.messages import SecureStage
from fedsift.privacy.secure.server import SecureServer

RUN, LARGEST = b"benchmark", 6
CODES = 240_000
CLIENTS = 100
SIZES = (
    ("CNN, d = 21,840", 4, 525),
    ("CNN, d = 21,840", 20, 525),
    ("VGG-11, d = 9,750,922", 20, 234_022),
    ("d = 10,000,000", 100, CODES),
    ("d = 10,000,000", 200, CODES),
)
"""Models, clients, and what sift-common sends at 2 %: a code per coordinate, and a fifth for V."""


class TimedRun:
    """A server and its clients in one process, with the CPU time of each."""

    def __init__(self, clients: int, n: int, neighbors: int) -> None:
        settings = SecureSettings(neighbors)
        self.server = SecureServer(RUN, settings)
        self.clients = [SecureClient(RUN, u, 64, settings) for u in range(clients)]
        draw = np.random.default_rng(0)
        self.codes = draw.integers(-LARGEST, LARGEST, n, endpoint=True)

    def round(self, number: int, lost: dict[int, SecureStage]) -> dict[str, dict[str, float]]:
        """Seconds and bytes per client, and seconds of the server, by stage."""
        client, server = Counter(), Counter()
        sizes, asked = StageBytes(), Counter()
        protocol = self.server.sum_round(number, range(len(self.clients)), len(self.codes), LARGEST)
        replies, stage = None, "start"
        while True:
            began = time.thread_time()
            try:
                request = next(protocol) if replies is None else protocol.send(replies)
            except StopIteration as end:
                server["unmask"] += time.thread_time() - began
                expected = len(end.value.weights) * 64 * self.codes
                if not (end.value.total == expected).all():
                    raise SystemExit("the sum is wrong") from None
                break
            server[stage] += time.thread_time() - began
            stage, replies = request.stage.name.lower(), {}
            for u, message in request.messages.items():
                if request.stage >= lost.get(u, 99):
                    continue
                began = time.thread_time()
                replies[u] = reply_of(self.clients[u], request.stage, message, lambda: self.codes)
                client[stage] += time.thread_time() - began
                asked[stage] += 1
            sizes.count(request, replies)
        n = len(self.clients)
        return {
            "client_seconds": {name: client[name] / asked[name] for name in asked},
            "server_seconds": dict(server),
            "uplink_bytes": {s.name.lower(): x / n for s, x in sizes.up.items()},
            "downlink_bytes": {s.name.lower(): x / n for s, x in sizes.down.items()},
        }


def measure_seconds(neighbors: int) -> dict[str, dict[str, dict[str, float]]]:
    """A round of each kind."""
    run = TimedRun(CLIENTS, CODES, neighbors)
    ten = range(10, 20)
    return {
        "first round": run.round(1, {}),
        "no losses": run.round(2, {}),
        "10 lost before": run.round(3, dict.fromkeys(ten, SecureStage.MASKED)),
        "10 back": run.round(4, {}),
        "10 lost after": run.round(5, dict.fromkeys(ten, SecureStage.REVEAL)),
    }


def measure_bytes(model: str, clients: int, n: int) -> dict[str, str | float]:
    """Bytes per client: once per run, then per round without losses."""
    run = TimedRun(clients, n, 0)
    first, later = run.round(1, {}), run.round(2, {})
    return {
        "model": model,
        "clients": clients,
        "codes": n,
        "neighbors": run.server.group.settings.neighbors,
        "threshold": run.server.group.settings.threshold,
        "once_up": sum(first["uplink_bytes"].values()) - sum(later["uplink_bytes"].values()),
        "once_down": sum(first["downlink_bytes"].values()) - sum(later["downlink_bytes"].values()),
        "masked_up": later["uplink_bytes"]["masked"],
        "other_up": later["uplink_bytes"]["consent"] + later["uplink_bytes"]["reveal"],
        "down": sum(later["downlink_bytes"].values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    report = {
        "command": f"python benchmarks/secure_aggregation.py --out {out}",
        "machine": {"processor": platform.processor() or platform.machine(), "cores": 1},
        "clients": CLIENTS,
        "codes": CODES,
        "largest": LARGEST,
        "seconds": {
            "default neighbors": measure_seconds(0),
            "20 neighbors": measure_seconds(20),
        },
        "bytes": [measure_bytes(*size) for size in SIZES],
    }
    out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

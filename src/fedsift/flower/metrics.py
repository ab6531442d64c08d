"""Metrics of a run in progress for Prometheus, on a port of this machine only."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from fedsift.errors import ConfigError
from fedsift.runs.status import Status
from fedsift.simulation import Record

ADDRESS = "127.0.0.1"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
KINDS = {
    "times as large as usual": "norm",
    "no reply within": "timeout",
    "the round had enough replies": "not needed",
    "no node is this client": "not connected",
    "Flower's error": "flower",
    "wrong ": "wrong field",
    "checksum": "checksum",
    "it claims to be": "identity",
    "its reply": "malformed reply",
    "Error: ": "client error",
}
"""Kinds of problems, by a phrase in their text. The first that fits is used."""


def problem_kind(text: str) -> str:
    """Return the kind of a problem: clients must not be able to choose labels of metrics.

    >>> problem_kind("no reply within 60 s"), problem_kind("anything")
    ('timeout', 'other')
    """
    return next((kind for phrase, kind in KINDS.items() if phrase in text), "other")


def metrics_text(status: Status, history: Sequence[Record], clients: int) -> str:
    """Return the metrics in Prometheus' text format. Bytes are totals over all clients."""
    last: Record = history[-1] if history else {}
    problems = Counter(problem_kind(why) for r in history for why in r["problems"].values())
    merged, rejected = (sum(r[key] for r in history) for key in ("clients", "rejected"))
    samples = [
        *metric("round", "gauge", "Last finished round.", status.round),
        *metric("rounds", "gauge", "Rounds of the run.", status.rounds),
        *metric("supernodes_connected", "gauge", "Connected SuperNodes.", status.connected),
        *metric("clients_waiting", "gauge", "Clients whose reply is awaited.",
                len(status.waiting_for)),
        *metric("merged_updates_total", "counter", "Updates that were merged.", merged),
        *metric("rejected_updates_total", "counter", "Updates that were rejected.", rejected),
        *metric("problems_total", "counter", "Updates that were not merged.", {
            f'problem="{kind}"': count for kind, count in sorted(problems.items())}),
        *metric("uplink_bytes_total", "counter", "Bytes received from clients.",
                clients * float(last.get("uplink_bytes", 0))),
        *metric("downlink_bytes_total", "counter", "Bytes sent to clients.",
                clients * float(last.get("downlink_bytes", 0))),
        *metric("round_seconds", "gauge", "Seconds of the last round.", status.round_seconds),
        *metric("accuracy", "gauge", "Test accuracy.", last.get("accuracy")),
        *metric("loss", "gauge", "Test loss.", last.get("loss")),
        *metric("train_loss", "gauge", "Mean loss of local steps.", last.get("train_loss")),
    ]  # fmt: skip
    return "\n".join(samples) + "\n"


def metric(
    name: str, kind: str, text: str, value: float | Mapping[str, float] | None
) -> Iterator[str]:
    r"""Yield the lines of a metric, one per set of labels; none if it has no value.

    >>> print(*metric("round", "gauge", "Last round.", 3), sep="\n")
    # HELP fedsift_round Last round.
    # TYPE fedsift_round gauge
    fedsift_round 3
    """
    if value is None:
        return
    yield f"# HELP fedsift_{name} {text}"
    yield f"# TYPE fedsift_{name} {kind}"
    if not isinstance(value, Mapping):
        yield f"fedsift_{name} {value}"
        return
    for labels, x in value.items():
        yield f"fedsift_{name}{{{labels}}} {x}"


@contextmanager
def metrics_server(port: int | None, text: Callable[[], str]) -> Iterator[None]:
    """Inside the block, serve the text at ``http://127.0.0.1:PORT/metrics``, unless it is None."""
    if port is None:
        yield
        return
    try:
        server = ThreadingHTTPServer((ADDRESS, port), handler_of(text))
    except OSError as problem:
        raise ConfigError(
            f"cannot serve metrics on {ADDRESS}:{port} ({problem.strerror}): choose another port"
        ) from None
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()


def handler_of(text: Callable[[], str]) -> type[BaseHTTPRequestHandler]:
    """Return the handler of requests, which knows one page."""

    class MetricsHandler(BaseHTTPRequestHandler):
        """Answers GET /metrics."""

        timeout = 10.0

        def do_GET(self) -> None:
            """Send the metrics."""
            if self.path != "/metrics":
                self.send_error(404)
                return
            body = text().encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: scrapes are frequent."""

    return MetricsHandler


def check_metrics_port(port: int | None) -> None:
    """Check a port to serve metrics on.

    >>> check_metrics_port(0)
    Traceback (most recent call last):
    ...
    ValueError: metrics_port must be from 1 to 65535, or None, got 0
    """
    if port is not None and not 1 <= port <= 65535:
        raise ValueError(f"metrics_port must be from 1 to 65535, or None, got {port}")

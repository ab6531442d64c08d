"""Shorter heartbeats and waits for Flower's processes, so that tests need not wait for them.

Python imports this module at its start if its folder is on PYTHONPATH. HEARTBEAT is the interval of
heartbeats in seconds, POLL the longest one between two questions for messages or tasks. CLOCK
names a file that holds by how many seconds the SuperLink's clock is wrong.

Flower's processes ask for messages and tasks at intervals. Asking often would take most of the CPU
time of a test, and asking rarely most of its time. Here, a process that sends something touches the
file ``bell`` in the federation's folder, and those that wait ask when the bell has rung.
"""

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


def load(*path: str) -> ModuleType:
    """Load a module of Flower's before anything else can copy its values."""
    flower, name = find_spec("flwr"), ".".join(["flwr", *path])
    assert flower is not None
    assert flower.origin is not None
    file = Path(flower.origin).parent.joinpath(*path).with_suffix(".py")
    about = spec_from_file_location(name, file)
    assert about is not None
    assert about.loader is not None
    module = sys.modules[name] = module_from_spec(about)
    about.loader.exec_module(module)
    return module


constant = load("common", "constant")
constant.HEARTBEAT_MIN_INTERVAL = 1  # type: ignore[attr-defined]
constant.HEARTBEAT_DEFAULT_INTERVAL = int(os.environ.get("HEARTBEAT", 10))  # type: ignore[attr-defined]
# A process waits for the interval minus this timeout: with the usual 5 seconds perhaps not at all.
constant.HEARTBEAT_CALL_TIMEOUT = constant.HEARTBEAT_DEFAULT_INTERVAL / 2  # type: ignore[attr-defined]

if "CLOCK" in os.environ and any(word.endswith("flower-superlink") for word in sys.orig_argv):
    date = load("supercore", "date")
    right, clock = date.now, Path(os.environ["CLOCK"])

    def wrong() -> datetime:
        """Return the time on a clock that may be wrong."""
        with suppress(OSError, ValueError):
            return right() + timedelta(seconds=float(clock.read_text()))
        return right()

    date.now = wrong  # type: ignore[attr-defined]

BELL = Path(os.environ.get("FLWR_HOME", "."), "bell")
LONGEST_WAIT = float(os.environ.get("POLL", 1.0))
"""Seconds without the bell after which a process asks all the same."""
RINGING = ("/PushMessages", "/PushObject", "/PushTaskOutput", "/StartRun")
"""The calls for whose effects other processes wait."""


def last_ring() -> int:
    """Return when the bell last rang, in nanoseconds."""
    with suppress(OSError):
        return BELL.stat().st_mtime_ns
    return 0


def ring_after(function: Callable[..., Any], is_ringing: Callable[..., bool]) -> Callable[..., Any]:
    """Return a function that also rings the bell, after calls that change something for others."""

    def called(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        if is_ringing(**named):
            with suppress(OSError):
                BELL.touch()
        return result

    return called


class Clock(SimpleNamespace):
    """The module ``time``, with a ``sleep`` that ends when the bell has rung and is silent again.

    Whoever sends a message sends many objects with it, each of which rings.
    """

    heard = 0

    def sleep(self, _: float) -> None:
        end, before = time.monotonic() + LONGEST_WAIT, last_ring()
        while time.monotonic() < end:
            time.sleep(0.05)
            now = last_ring()
            if now == before != self.heard:
                break
            before = now
        self.heard = before


def wait_for_bell(module: ModuleType) -> None:
    """Let a module of Flower's wait for the bell wherever it sleeps."""
    module.time = Clock(**{name: x for name, x in vars(time).items() if name != "sleep"})  # type: ignore[attr-defined]


is_node, is_executor = (
    any(word.endswith(name) for word in sys.orig_argv) for name in ("flower-supernode", "superexec")
)
if is_node or is_executor or any(word.endswith("flwr") for word in sys.orig_argv):
    from flwr.supercore.protobuf.client import ProtobufClient

    ProtobufClient._unary_unary = ring_after(  # type: ignore[method-assign]
        ProtobufClient._unary_unary, lambda rpc_method, **_: rpc_method.endswith(RINGING)
    )

if is_executor:
    from flwr.supercore.superexec import run_superexec

    wait_for_bell(run_superexec)

if is_node:
    from flwr.supernode import start_client_internal
    from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

    wait_for_bell(start_client_internal)
    InMemoryNodeState.store_message = ring_after(  # type: ignore[method-assign]
        InMemoryNodeState.store_message, lambda **_: True
    )
    if "HOSTILE" in os.environ:
        import hostile

        hostile.install()

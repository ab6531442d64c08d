"""Shorter heartbeats and waits for Flower's processes, so that tests need not wait for them.

Python imports this module at its start if its folder is on PYTHONPATH. HEARTBEAT is the interval of
heartbeats in seconds, POLL that of a SuperNode's questions for messages. CLOCK names a file that
holds by how many seconds the SuperLink's clock is wrong.
"""

import os
import sys
import time
from contextlib import suppress
from datetime import datetime, timedelta
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace


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

if "CLOCK" in os.environ and any(word.endswith("flower-superlink") for word in sys.orig_argv):
    date = load("supercore", "date")
    right, clock = date.now, Path(os.environ["CLOCK"])

    def wrong() -> datetime:
        """Return the time on a clock that may be wrong."""
        with suppress(OSError, ValueError):
            return right() + timedelta(seconds=float(clock.read_text()))
        return right()

    date.now = wrong  # type: ignore[attr-defined]

if any(word.endswith("flower-supernode") for word in sys.orig_argv):
    from flwr.supernode import start_client_internal

    # A SuperNode asks for messages every 3 seconds, and for its client's reply every 0.5.
    wait = SimpleNamespace(**vars(time))
    poll = float(os.environ.get("POLL", 0.2))
    wait.sleep = lambda seconds: time.sleep(min(seconds, poll))
    start_client_internal.time = wait  # type: ignore[attr-defined]
    if "HOSTILE" in os.environ:
        import hostile

        hostile.install()

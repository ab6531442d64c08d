"""Shorter heartbeats and waits for Flower's processes, so that tests need not wait for them.

Python imports this module at its start if its folder is on PYTHONPATH.
"""

import os
import sys
import time
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

flower = find_spec("flwr")
assert flower is not None
assert flower.origin is not None
name = "flwr.common.constant"
about = spec_from_file_location(name, Path(flower.origin).parent / "common" / "constant.py")
assert about is not None
assert about.loader is not None
constant = module_from_spec(about)
about.loader.exec_module(constant)
constant.HEARTBEAT_DEFAULT_INTERVAL = 10  # type: ignore[attr-defined]
constant.HEARTBEAT_CALL_TIMEOUT = 2  # type: ignore[attr-defined]
sys.modules[name] = constant  # before anything else has copied the values

if any(word.endswith("flower-supernode") for word in sys.orig_argv):
    from flwr.supernode import start_client_internal

    # A SuperNode asks for messages every 3 seconds, and for its client's reply every 0.5.
    wait = SimpleNamespace(**vars(time))
    wait.sleep = lambda seconds: time.sleep(min(seconds, 0.2))
    start_client_internal.time = wait  # type: ignore[attr-defined]
    if "HOSTILE" in os.environ:
        import hostile

        hostile.install()

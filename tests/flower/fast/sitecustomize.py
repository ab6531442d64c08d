"""Shorter heartbeats for Flower's processes, so that a test need not wait a minute for a death.

Python imports this module at its start if its folder is on PYTHONPATH.
"""

import os
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

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

if "HOSTILE" in os.environ and any(word.endswith("flower-supernode") for word in sys.orig_argv):
    import hostile

    hostile.install()

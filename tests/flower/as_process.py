"""Run a command in a forked process as a new interpreter would: ``-m as_process COMMAND …``.

Flower is imported already, with its own intervals and clock; this gives it those of ``fast``.
"""

import os
import runpy
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
CHANGED = ("flwr.common.constant", "flwr.supercore.date")
"""The modules of Flower's that ``fast`` replaces."""


def main() -> None:
    sys.argv = sys.argv[1:]
    sys.orig_argv[:] = [sys.executable, *sys.argv]
    own = [path for path in sys.path if not Path(path).is_relative_to(TESTS)]
    sys.path[:] = [*os.environ["PYTHONPATH"].split(os.pathsep), *own]
    before = [vars(sys.modules[name]) for name in CHANGED]
    runpy.run_path(str(TESTS / "flower" / "fast" / "sitecustomize.py"))
    for name, old in zip(CHANGED, before, strict=True):
        replace_imported(old, vars(sys.modules[name]))
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def replace_imported(old: dict[str, object], new: dict[str, object]) -> None:
    """Set constants and the clock in every module of Flower's that has imported them."""
    changed = {n: x for n, x in new.items() if (n.isupper() or n == "now") and x != old[n]}
    for name, module in list(sys.modules.items()):
        if name.startswith("flwr."):
            vars(module).update({n: x for n, x in changed.items() if vars(module).get(n) == old[n]})


if __name__ == "__main__":
    main()

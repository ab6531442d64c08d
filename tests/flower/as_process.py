"""Run a command in a forked process as a new interpreter would: ``-m as_process COMMAND …``.

Flower is imported already, with its own intervals; this gives it those of ``fast``.
"""

import os
import runpy
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def main() -> None:
    sys.argv = sys.argv[1:]
    sys.orig_argv[:] = [sys.executable, *sys.argv]
    own = [path for path in sys.path if not Path(path).is_relative_to(TESTS)]
    sys.path[:] = [*os.environ["PYTHONPATH"].split(os.pathsep), *own]
    before = vars(sys.modules["flwr.common.constant"])
    runpy.run_path(str(TESTS / "flower" / "fast" / "sitecustomize.py"))
    after = vars(sys.modules["flwr.common.constant"])
    replace_constants({n: x for n, x in after.items() if n.isupper() and x != before[n]})
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def replace_constants(values: dict[str, object]) -> None:
    """Set constants in every module that has imported them."""
    for name, module in list(sys.modules.items()):
        if name.startswith("flwr."):
            vars(module).update({name: x for name, x in values.items() if name in vars(module)})


if __name__ == "__main__":
    main()

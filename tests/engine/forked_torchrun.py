"""torchrun whose ranks are forks of a process that has imported PyTorch: ``-m forked_torchrun …``.

The agent, the environment of the ranks and the way they end are torchrun's own. If the environment
names a folder RANKS, the process of each rank is noted there.
"""

import runpy
from pathlib import Path

from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import (
    SubprocessHandler,
)

from fork_server import ForkedPython


def fork(handler, arguments, environment):
    words = arguments[arguments.index("-m") :]
    outputs = [Path(f"/proc/self/fd/{number}").readlink() for number in (1, 2)]
    process = ForkedPython(*words, env=environment, start_new_session=True, outputs=outputs)
    if folder := environment.get("RANKS"):
        Path(folder, f"rank-{environment['RANK']}").write_text(str(process.pid))
    return process


if __name__ == "__main__":
    SubprocessHandler._popen = fork
    runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)

"""A process whose clients train until Ctrl-C; then it repeats the round."""

import os
import sys
import time
from dataclasses import replace
from multiprocessing import current_process
from pathlib import Path

import torch
from test_engine import federation
from torch.nn.functional import cross_entropy

from fedsift.engine import Forked, Reference
from fedsift.engine.processes import forked


def main(folder):
    def loss(output, labels):
        if current_process().daemon and (folder / "wait").exists():
            (folder / f"{os.getpid()}.pid").touch()
            time.sleep(3600)
        return cross_entropy(output, labels)

    forked.MIN_PARALLEL_SECONDS = -1.0  # the second time, too, in processes
    made = federation(participation=1.0, dropout=0.0)
    task = replace(made.task, loss=loss)
    fed = replace(made, task=task, engine=Forked(task, made.algorithm, 2))
    fed.engine.start_pool()
    try:
        fed.run_round(fed.initial_snapshot())
    except KeyboardInterrupt:
        (folder / "wait").unlink()
        print("interrupted", flush=True)
    ours, _ = fed.run_round(fed.initial_snapshot())
    theirs, _ = replace(fed, engine=Reference(task)).run_round(fed.initial_snapshot())
    print("the same" if torch.equal(ours.state.w, theirs.state.w) else "another")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""The SuperExec that forks tasks: one process per task, and Flower's own way as the fallback."""

import json
import os
import random
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import subprocess_executor
from flwr.supercore.superexec.executor.types import ExecutionSpec

from fedsift.errors import ConfigError
from fedsift.flower import superlink, warm

SPEC = ExecutionSpec(TaskType.CLIENT_APP, "127.0.0.1:1", "secret", True, None, False, 7, False, 1)


def note():
    """Stand in for flwr-clientapp: write what this process is."""
    drawn = random.random(), np.random.random()  # noqa: NPY002
    about = [os.getpid(), sys.argv, *drawn]
    Path(os.environ["NOTES"], str(os.getpid())).write_text(json.dumps(about))


def test_each_task_is_a_forked_process_with_its_own_random_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv("NOTES", str(tmp_path))
    monkeypatch.setattr(warm, "ENTRY_POINTS", {TaskType.CLIENT_APP: (__name__, "note")})
    read, write = os.pipe()
    if os.fork() == 0:
        os.close(write)
        with open(read, "rb") as orders:
            order = warm.fork_per_order(orders)
        if order is not None:
            warm.end_process(warm.run_task(order))
        os._exit(0)
    os.close(read)
    executor = warm.ForkExecutor(write)
    for _ in range(2):
        executor.launch(SPEC)
    until = time.monotonic() + 30
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    os.close(write)
    os.wait()  # the server ends with its pipe
    (pid, words, *drawn), (other, _, *drawn_there) = (
        json.loads(path.read_text()) for path in tmp_path.iterdir()
    )
    assert len({pid, other, os.getpid()}) == 3
    assert words == ["flwr-clientapp", "--runtime-api-address", "127.0.0.1:1", "--token", "secret",
                     "--insecure", "--parent-pid", "7"]  # fmt: skip
    assert not set(drawn) & set(drawn_there)


def test_a_superlink_that_fails_is_asked_for_work_again(monkeypatch):
    """Its database may be locked. Flower's SuperExec would end, and no run would start again."""
    monkeypatch.setattr(superlink, "WAITS", (0, 0))
    order, asked = run_superexec.AcquireTaskRequest(), []

    def answer(self, path, request, **_):
        asked.append(request)
        if len(asked) < 3:
            failed = httpx.Request("POST", f"http://superlink{path}")
            httpx.Response(500, request=failed).raise_for_status()
        return "a task"

    monkeypatch.setattr(warm.RuntimeHttpClient, "_unary_unary", answer)
    client = warm.PatientClient("http://superlink")
    assert client.AcquireTask(order) == "a task"
    client.close()
    assert asked == [order] * 3


def test_flowers_superexec_makes_its_client_from_the_name_that_is_replaced():
    assert run_superexec.RuntimeHttpClient is warm.RuntimeHttpClient


def test_without_the_fork_server_a_task_starts_as_flower_starts_it(monkeypatch):
    started = []
    monkeypatch.setattr(subprocess_executor.subprocess, "Popen", lambda *args: started.append(args))
    read, write = os.pipe()
    os.close(read)
    warm.ForkExecutor(write).launch(SPEC)
    os.close(write)
    ((words,),) = started
    assert words == ["flwr-clientapp", *warm.arguments_of(SPEC)]


def test_a_module_that_is_not_installed_is_refused():
    with pytest.raises(ConfigError, match="cannot preload nonsense: No module named 'nonsense'"):
        warm.import_all(["nonsense"])

"""Federations of real processes for the tests: TLS, node keys, and short heartbeats."""

import os
import signal

import pytest
from processes import HERE, SOURCE, ForkedFederation, processes_of

collect_ignore = ["app", "fast", "quickstart"]  # other processes import these


@pytest.fixture
def federation_of(tmp_path_factory):
    """Start a federation with a number of nodes; all its processes end with the test.

    Flower notices that a process is gone when two of its heartbeats are missing.
    """
    started = []

    def start(nodes, heartbeat=8):
        folder = tmp_path_factory.mktemp("federation")
        path = os.pathsep.join([str(HERE / "fast"), SOURCE])
        environment = {"PYTHONPATH": path, "HEARTBEAT": str(heartbeat)}
        federation = ForkedFederation(folder, environment)
        started.append(federation)
        federation.__enter__()
        keys = federation.register([f"node-{n}" for n in range(nodes)])
        for n, (name, key) in enumerate(keys.items()):
            federation.start_node(name, key, n, nodes)
        return federation

    yield start
    for federation in started:
        federation.close(signal.SIGKILL)
        federation.wait_until(lambda home=federation.home: not processes_of(home))

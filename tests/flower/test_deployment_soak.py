"""Twenty rounds of the soak: real processes that are killed, stopped and attacked."""

import os
import subprocess
import sys

import soak as script
from processes import SOURCE, ForkedFederation
from soak import Soak, soak

ALWAYS_LOST = {"raise", "corrupt", "round", "nan", "garbage"}


def test_twenty_rounds_of_faults_end_with_the_bits_of_a_simulation(tmp_path):
    found = soak(20, 17354, tmp_path, ForkedFederation, heartbeat=5)
    assert found["same bits"]
    assert found["rounds"] == 20
    assert found["faults"].keys() >= {
        "kill server", "kill superlink", "kill node", "stop node", "clock superlink", "noise",
        "hang", "pause", "replay", "garbage", "corrupt", "nan",
    }  # fmt: skip
    assert found["restarts of the run"] >= 1
    assert found["lost or refused"] >= 5
    for fault in set(found["faults"]) & ALWAYS_LOST:
        assert found["lost to"][fault] == found["faults"][fault], fault
    assert found["memory growth MiB"] < 100
    assert found["files growth"] < 50


def test_the_faults_follow_from_the_seed():
    one, same, other = (Soak(None, 50, seed) for seed in (1, 1, 2))
    assert (one.faults, one.events) == (same.faults, same.events)
    assert one.faults != other.faults
    assert all(len(faults) < 3 for faults in one.faults.values())  # one client is always honest


def test_the_soak_is_a_command():
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    words = [sys.executable, script.__file__, "--help"]
    said = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert "soak.py ROUNDS" in said.stdout

"""What the fuzzer found worth keeping, decoded again without it."""

import importlib.util
from pathlib import Path

import pytest

FUZZ = Path(__file__).parents[2] / "fuzz"
CASES = sorted((FUZZ / "corpus").iterdir())


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location("check", FUZZ / "check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.check


def test_there_are_seeds_and_cases_that_were_found():
    assert len([case for case in CASES if "-" in case.name]) >= 20
    assert len(CASES) > 80


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_an_update_or_a_reason(case, check):
    accepted = check(case.read_bytes())
    assert accepted or len(case.name) == 40  # a seed is a frame; what was found need not be

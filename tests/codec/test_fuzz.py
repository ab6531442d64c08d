"""The fuzzer's corpus, decoded without the fuzzer."""

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


def test_the_corpus_has_seeds_and_found_cases():
    assert len([case for case in CASES if "-" in case.name]) >= 20
    assert len(CASES) > 80


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_gives_an_update_or_a_frame_error(case, check):
    accepted = check(case.read_bytes())
    assert accepted or len(case.name) == 40  # seeds are valid frames, found cases need not be

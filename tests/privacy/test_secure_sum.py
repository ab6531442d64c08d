"""The sum is exact, whoever is lost, or the round stops and says why."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsift.privacy.secure import SecureSettings, SecureSumStopped
from fedsift.privacy.secure.integers import bits_for, from_words, pack_words, to_words, unpack_words
from fedsift.privacy.secure.messages import SecureStage
from privacy.parties import Parties, random_codes, weighted_sum

LATE = (SecureStage.CONSENT, SecureStage.REVEAL)
STAGES = (SecureStage.KEYS, SecureStage.SHARES, SecureStage.MASKED, *LATE)


def check_sum(parties: Parties, round: int, codes: dict[int, np.ndarray]) -> None:
    """Run a round: the sum is that of the clients in it, and they are the right ones."""
    found, _ = parties.sum_round(round, codes)
    early = {u for u, stage in parties.lost.items() if stage <= SecureStage.MASKED}
    assert set(codes) - set(parties.lost) <= set(found.weights) <= set(codes) - early
    assert found.total.tolist() == weighted_sum(codes, found.weights).tolist()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_sum_is_exact_whoever_is_lost_up_to_the_threshold(data: st.DataObject) -> None:
    clients = data.draw(st.integers(3, 9), "clients")
    threshold = SecureSettings().resolved(clients).threshold
    lost = data.draw(
        st.dictionaries(
            st.integers(0, clients - 1), st.sampled_from(STAGES), max_size=clients - 1 - threshold
        ),
        "lost",
    )
    weights = data.draw(st.lists(st.integers(1, 64), min_size=clients, max_size=clients))
    n = data.draw(st.integers(0, 20), "values")
    parties = Parties(dict(enumerate(weights)))
    lost_in = data.draw(st.integers(1, 2), "round of the losses")
    for round in (1, 2, 3):
        parties.lost = lost if round == lost_in else {}
        codes = random_codes(clients, n, seed=round)
        if parties.lost and clients - sum(s <= SecureStage.SHARES for s in lost.values()) < 4:
            continue
        check_sum(parties, round, codes)
    assert not parties.refusals


@pytest.mark.parametrize("stage", STAGES)
def test_of_20_clients_30_percent_may_be_lost_at_any_stage(stage: SecureStage) -> None:
    parties = Parties(dict.fromkeys(range(20), 64), lost=dict.fromkeys(range(3, 9), stage))
    codes = random_codes(20)
    found, _ = parties.sum_round(1, codes)
    expected = set(range(20)) if stage in LATE else set(range(20)) - set(range(3, 9))
    assert set(found.weights) == expected
    assert found.total.tolist() == weighted_sum(codes, found.weights).tolist()
    parties.lost = {}
    check_sum(parties, 2, codes)
    assert not parties.refusals


@pytest.mark.parametrize("stage", STAGES)
def test_a_round_that_loses_too_many_stops_and_the_next_one_works(stage: SecureStage) -> None:
    lost = dict.fromkeys(range(9 if stage > SecureStage.SHARES else 18), stage)
    parties = Parties(dict.fromkeys(range(20), 1), lost=lost)
    codes = random_codes(20)
    with pytest.raises(SecureSumStopped, match=r"too few|at least 3 clients|restore its mask"):
        parties.sum_round(1, codes)
    parties.lost = {}
    check_sum(parties, 2, codes)


def test_losses_before_and_after_the_masked_values_make_a_second_attempt() -> None:
    lost = {1: SecureStage.MASKED, 2: SecureStage.CONSENT, 3: SecureStage.REVEAL}
    parties = Parties(dict.fromkeys(range(9), 1), lost=lost)
    codes = random_codes(9)
    found, _ = parties.sum_round(1, codes)
    assert sorted(found.weights) == [0, 3, 4, 5, 6, 7, 8]
    assert found.total.tolist() == weighted_sum(codes, found.weights).tolist()
    assert [len(parties.received[SecureStage.MASKED, u]) for u in (0, 2, 3)] == [2, 1, 2]


def test_late_losses_of_many_clients_over_time_leave_enough_shares() -> None:
    """A client that leaves an attempt forgets the shares it holds; the others share new keys."""
    parties, codes = Parties(dict.fromkeys(range(12), 1)), random_codes(12, 2)
    for round in range(1, 8):
        parties.lost = {round: SecureStage.REVEAL}
        check_sum(parties, round, codes)
    parties.lost = dict.fromkeys((0, 9, 10), SecureStage.REVEAL)
    check_sum(parties, 8, codes)
    assert not parties.refusals


def test_on_a_sparse_graph_the_sum_is_exact_too() -> None:
    lost = {4: SecureStage.MASKED, 11: SecureStage.REVEAL, 17: SecureStage.CONSENT}
    parties = Parties(dict.fromkeys(range(30), 3), SecureSettings(neighbors=12), lost)
    codes = random_codes(30)
    check_sum(parties, 1, codes)
    parties.lost = {}
    check_sum(parties, 2, codes)
    assert not parties.refusals


def test_keys_and_shares_are_sent_once_per_run_and_after_a_loss() -> None:
    parties = Parties(dict.fromkeys(range(12), 1))
    codes = random_codes(12)
    sizes = [parties.sum_round(round, codes)[1] for round in (1, 2)]
    parties.lost = {2: SecureStage.REVEAL}
    parties.sum_round(3, codes)
    parties.lost = {}
    sizes.append(parties.sum_round(4, codes)[1])
    assert [SecureStage.KEYS in size.up for size in sizes] == [True, False, False]
    shares = [size.up.get(SecureStage.SHARES, 0) for size in sizes]
    assert shares == [12 * shares[2], 0, 3 + 1 + 11 * 32]


def test_bytes_per_client_and_round_with_20_clients() -> None:
    parties = Parties(dict.fromkeys(range(20), 64))
    parties.sum_round(1, random_codes(20, 525))
    _, sizes = parties.sum_round(2, random_codes(20, 525))
    per_client = {stage.name: size / 20 for stage, size in sizes.up.items()}
    assert per_client == {"MASKED": 3 + 591, "CONSENT": 3 + 64, "REVEAL": 3 + 16}


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 2**40), st.integers(0, 200), st.integers(0, 2**32))
def test_integers_survive_packing(largest: int, n: int, seed: int) -> None:
    bits = bits_for(largest)
    values = np.random.default_rng(seed).integers(-largest, largest, n, endpoint=True)
    words = unpack_words(pack_words(to_words(values, bits), bits), n, bits)
    assert from_words(words, bits).tolist() == values.tolist()
    assert 2**bits > 2 * largest >= 2 ** (bits - 1)


def test_large_vectors_are_packed_in_chunks() -> None:
    values = np.random.default_rng(0).integers(-100, 100, 300_001)
    words = to_words(values, 9)
    packed = pack_words(words, 9)
    assert len(packed) == -(-300_001 * 9 // 8)
    assert (from_words(unpack_words(packed, len(values), 9), 9) == values).all()


@pytest.mark.parametrize(
    ("given_settings", "clients", "message"),
    [
        (SecureSettings(), 2, "at least 3 clients"),
        (SecureSettings(neighbors=5), 20, "secure_neighbors must be an even number"),
        (SecureSettings(neighbors=20), 20, "secure_neighbors must be an even number"),
        (SecureSettings(threshold=9), 20, "secure_threshold must be from 10 to 19"),
        (SecureSettings(threshold=20), 20, "secure_threshold must be from 10 to 19"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(
    given_settings: SecureSettings, clients: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as problem:
        given_settings.resolved(clients)
    assert "\n" not in str(problem.value)


def test_the_cost_table_of_the_documentation_is_that_of_the_committed_results() -> None:
    root = Path(__file__).parents[2]
    results = json.loads((root / "benchmarks/results/secure_aggregation.json").read_text())
    text = (root / "docs/explanation/privacy.md").read_text()
    columns = ("once_up", "once_down", "masked_up", "other_up", "down")
    for row in results["bytes"]:
        sizes = " | ".join(f"{row[column]:,.0f}" for column in columns)
        assert f"| {row['clients']} | {row['codes']:,} | " in text
        assert f" | {sizes} |" in text

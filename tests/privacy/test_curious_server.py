"""The server follows the protocol, keeps everything it receives, and learns one sum only."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsift.privacy.secure import SecureSettings, SecureSumStopped
from fedsift.privacy.secure.integers import from_words, unpack_words, word_type
from fedsift.privacy.secure.messages import SecureStage
from fedsift.privacy.secure.primitives import mask_of
from privacy.curious import CuriousServer, smallest_exposed_sum
from privacy.parties import LARGEST, Parties, random_codes

STAGES = (
    SecureStage.KEYS,
    SecureStage.SHARES,
    SecureStage.MASKED,
    SecureStage.CONSENT,
    SecureStage.REVEAL,
    SecureStage.RECOVER,
)


def check_only_the_sum(
    parties: Parties, curious: CuriousServer, round: int, n: int, cohort: set[int] | None = None
) -> None:
    """Run a round: what the server can compute is the sum that it returns.

    If the round stops, replies that come too late may still give it one sum of many clients.
    """
    clients = len(parties.clients)
    codes = random_codes(clients, n)
    codes = {u: codes[u] for u in cohort or codes}
    try:
        found, _ = parties.sum_round(round, codes)
    except SecureSumStopped:
        basis = curious.exposed(round)
        assert len(basis) <= 1
        fewest = parties.server.group.settings.threshold
        assert not len(basis) or smallest_exposed_sum(basis) > fewest
        return
    basis = curious.exposed(round)
    expected = np.array([float(u in found.weights) for u in range(clients)])
    assert basis.shape == (1, clients)
    assert np.allclose(np.abs(basis[0]) * np.sqrt(len(found.weights)), expected)


@pytest.mark.parametrize("late", [False, True], ids=["lost", "late"])
@pytest.mark.parametrize("stage", STAGES)
def test_with_30_percent_of_20_clients_lost_only_the_sum_is_known(
    stage: SecureStage, late: bool
) -> None:
    """Late replies arrive after the server has given up on them: it can read them all the same.

    Keys are restored only if a client was lost before, so one is.
    """
    lost = dict.fromkeys(range(3, 9), stage)
    lost |= {9: SecureStage.REVEAL} if stage is SecureStage.RECOVER else {}
    late_replies = frozenset(lost) if late else frozenset()
    parties = Parties(dict.fromkeys(range(20), 1), lost=lost, lost_replies=late_replies)
    curious = CuriousServer(parties)
    check_only_the_sum(parties, curious, 1, n=8)
    parties.lost = {4: SecureStage.MASKED, 12: SecureStage.REVEAL}
    check_only_the_sum(parties, curious, 2, n=8)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_whoever_is_lost_in_several_rounds_only_the_sums_are_known(data: st.DataObject) -> None:
    clients = data.draw(st.integers(3, 7), "clients")
    parties = Parties(dict.fromkeys(range(clients), 1))
    curious = CuriousServer(parties)
    for round in range(1, 4):
        members = st.integers(0, clients - 1)
        lost = st.dictionaries(members, st.sampled_from(STAGES), max_size=3)
        parties.lost = data.draw(lost, f"lost in round {round}")
        parties.lost_replies = frozenset(data.draw(st.sets(members), "late"))
        cohort = data.draw(st.none() | st.sets(members, min_size=3), "cohort")
        check_only_the_sum(parties, curious, round, 4, cohort)
    check_only_the_sum(parties, curious, 1 + round, n=4)


@pytest.mark.parametrize("stage", STAGES[2:5])
def test_no_subset_of_the_keys_unmasks_a_client_or_a_part_of_the_sum(stage: SecureStage) -> None:
    """On the bytes themselves: each subset of clients, each subset of the keys the server has."""
    parties = Parties(
        dict.fromkeys(range(5), 1), SecureSettings(threshold=3), {2: stage}, frozenset({2})
    )
    curious = CuriousServer(parties)
    codes = random_codes(5, 16)
    found, _ = parties.sum_round(1, codes)
    known = curious.known_keys()
    bits = 7  # 5 clients, codes of magnitude 7
    masked = {
        u: unpack_words(parties.received[SecureStage.MASKED, u][0][3:], 16, bits) for u in range(5)
    }
    sums = 0
    for size in range(1, 6):
        for subset in combinations(range(5), size):
            truth = sum(codes[u] for u in subset)
            keys = {(u, curious.self_key(u, 1, 0)): -1 for u in subset} | {
                (u, curious.pair_key(u, v, 1, 0)): -1 if v > u else 1
                for u in subset
                for v in range(5)
                if v != u and v not in subset
            }
            signed = [(key, sign) for (_, key), sign in keys.items() if key in known]
            for used in product((False, True), repeat=len(signed)):
                total = np.zeros(16, word_type(bits))
                for u in subset:
                    total += masked[u]
                for (key, sign), is_used in zip(signed, used, strict=True):
                    if is_used:
                        mask = mask_of(key, 16, total.dtype)
                        total = total + mask if sign > 0 else total - mask
                if from_words(total, bits).tolist() == truth.tolist():
                    assert set(subset) == set(found.weights)
                    sums += 1
    assert sums == 1


def test_the_attack_finds_what_is_exposed_when_a_client_breaks_the_rules() -> None:
    """The test of the test: neighbors that give both masks away expose a client."""
    parties = Parties(dict.fromkeys(range(5), 1), lost={2: SecureStage.MASKED}, lost_replies={2})
    curious = CuriousServer(parties)
    parties.sum_round(1, random_codes(5))
    assert smallest_exposed_sum(curious.exposed(1)) == 4
    parties.received[SecureStage.REVEAL, 2] = [curious.self_key(2, 1, 0)]
    assert smallest_exposed_sum(curious.exposed(1)) == 1


def test_masked_values_look_uniform_and_differ_between_rounds() -> None:
    parties = Parties(dict.fromkeys(range(4), 1))
    codes = {u: np.full(4096, LARGEST) for u in range(4)}
    for round in (1, 2):
        parties.sum_round(round, codes)
    first, second = (unpack_words(r[3:], 4096, 6) for r in parties.received[SecureStage.MASKED, 0])
    for words in (first, second, (first - second) & 63):
        counts = np.bincount(words.astype(int), minlength=64)
        assert ((counts - 64) ** 2 / 64).sum() < 125  # chi-squared with 63 degrees, p < 1e-5

"""The server tells clients different things, or repeats rounds: no values of few are exposed."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsift.privacy.secure import SecureSettings, SecureSumStopped
from fedsift.privacy.secure import client as client_module
from fedsift.privacy.secure.integers import from_words, unpack_words
from fedsift.privacy.secure.messages import MessageHeader, SecureStage, client_list
from privacy.curious import smallest_exposed_sum
from privacy.lying import LyingServer
from privacy.parties import Parties, random_codes

VICTIM = 2
TERMS = {"bits": (16, 15), "unit": (1, 64), "basis": (b"a model", b"a model without gradients")}


def finished(server: LyingServer, round: int) -> None:
    """All sign that nobody was lost; self masks are revealed, or restored by neighbors."""
    for u in server.all:
        server.consent(u, server.all)
    for u in server.all:
        server.reveal(u)
        server.recover(u, set(server.all) - {u})


def total_without_self_masks(server: LyingServer, round: int) -> np.ndarray:
    """What is left of the sum of all masked vectors: the values, if all pairwise masks cancel."""
    total = np.zeros(12, np.uint16)
    for u in server.all:
        masked = server.parties.received[SecureStage.MASKED, u][-1][3:]
        total += unpack_words(masked, 12, 15 if len(masked) == 23 else 16)
        client_module.add_masks(total, [], [server.curious.self_key(u, round, 0)])
    return from_words(total, 15)


@pytest.mark.parametrize("what", [None, *TERMS])
def test_masks_cancel_only_between_clients_that_were_told_the_same(what: str | None) -> None:
    """Pasquini, Francati, Ateniese (CCS 2022): all but one get a model that makes values vanish.

    Here, the values of all others count 64 times less than the victim's. Their sum hides nothing.
    """
    server = LyingServer(6, weight=64)
    for u in server.all:
        told = {"bits": 16, **({what: TERMS[what][u != VICTIM]} if what else {})}
        assert server.mask(u, 2, 0, server.all, **told)
    finished(server, 2)
    codes = random_codes(6, seed=2)
    found = total_without_self_masks(server, 2)
    if what is None:
        assert found.tolist() == (64 * sum(codes.values())).tolist()
        return
    assert len(server.curious.exposed(2)) == 0
    factors = {u: 1 if what == "unit" and u != VICTIM else 64 for u in server.all}
    mixed = sum(factors[u] * codes[u] for u in server.all)
    assert (found != mixed).sum() >= 11


def test_others_that_were_told_other_terms_do_not_help_each_other() -> None:
    """Both halves were told the same among themselves: each is below the threshold."""
    server = LyingServer(8)
    for u in server.all:
        assert server.mask(u, 2, 0, server.all, basis=b"a" if u < 4 else b"b")
    finished(server, 2)
    assert server.refusals
    assert len(server.curious.exposed(2)) == 0


def sum_with_few_revealing(server: LyingServer, revealing: set[int]) -> None:
    """A sum of all in round 2, for which only some are asked; the others do not know of it."""
    for u in server.all:
        server.mask(u, 2, 0, server.all)
    for u in server.all:
        server.consent(u, server.all)
    for u in revealing:
        assert server.reveal(u)
        assert server.recover(u, set(server.all) - revealing)
    assert len(server.curious.exposed(2)) == 1


@pytest.mark.parametrize("claimed", [2, 3])
def test_clients_of_a_sum_do_not_form_a_smaller_group_in_the_same_round(claimed: int) -> None:
    """The server calls it the group of the next round, but asks for values of this round."""
    server = LyingServer(8)
    unaware = set(server.all) - {0, 1, 2, 3, 4}
    sum_with_few_revealing(server, set(server.all) - unaware)
    for u in unaware:
        server.deal(u, group=unaware, round=claimed, deliver=True)
    for u in unaware:
        assert server.mask(u, 2, 1, unaware) is None
    messages = {2: "the group has changed within a round", 3: "this group is for later rounds"}
    assert messages[claimed] in server.refusals
    assert len(server.curious.exposed(2)) == 1


def test_a_smaller_group_may_follow_in_the_next_round() -> None:
    server = LyingServer(8)
    unaware = set(server.all) - {0, 1, 2, 3, 4}
    sum_with_few_revealing(server, set(server.all) - unaware)
    for u in unaware:
        assert server.deal(u, group=unaware, round=3, deliver=True)
    for u in unaware:
        assert server.mask(u, 3, 0, unaware)


def test_a_sum_of_fewer_clients_than_the_client_accepts_is_refused() -> None:
    server = LyingServer(6, min_clients=6)
    others = set(server.all) - {5}
    assert server.mask(0, 2, 0, others) is None
    for u in server.all:
        assert server.mask(u, 2, 0, server.all)
    assert server.consent(0, others) is None
    assert set(server.refusals) == {"5 clients take part, not 6"}
    parties = Parties(
        dict.fromkeys(range(6), 1), SecureSettings(min_clients=6), {5: SecureStage(3)}
    )
    with pytest.raises(SecureSumStopped, match="a sum 6 clients"):
        parties.sum_round(1, random_codes(6))
    assert not parties.refusals


def test_one_client_under_two_numbers_is_refused() -> None:
    server = LyingServer(5)
    request = bytes(MessageHeader(SecureStage.SHARES, 9, 0)) + client_list(range(6))
    doubled = request + client_list([5]) + server.clients[2].public[2]
    assert server.ask(SecureStage.SHARES, 0, doubled) is None
    half = request + client_list([5]) + server.clients[2].public[2][:32] + bytes(range(32))
    assert server.ask(SecureStage.SHARES, 0, half) is None
    assert server.refusals == 2 * ["two clients have the same public key"]


def test_a_client_that_copies_the_keys_of_another_is_lost() -> None:
    parties = Parties(dict.fromkeys(range(5), 1))
    parties.alter = lambda stage, u, reply: (
        parties.received[stage, 1][0] if (stage, u) == (SecureStage.KEYS, 3) else reply
    )
    found, _ = parties.sum_round(1, random_codes(5))
    assert sorted(found.weights) == [0, 1, 2, 4]
    assert found.problems == {3: "two clients have the same public key"}


def test_no_stream_masks_two_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key is used once for adding, and once by the neighbor for subtracting."""
    added, subtracted = Counter[bytes](), Counter[bytes]()

    def recorded(total: np.ndarray, keys: list[bytes], subtract: list[bytes] = ()) -> None:
        added.update(keys)
        subtracted.update(subtract)
        add_masks(total, keys, subtract)

    add_masks = client_module.add_masks
    monkeypatch.setattr(client_module, "add_masks", recorded)
    parties = Parties(dict.fromkeys(range(9), 1))
    lost = {1: SecureStage.MASKED, 2: SecureStage.CONSENT, 3: SecureStage.REVEAL}
    for round, parties.lost in enumerate(2 * ({}, lost, {4: SecureStage.REVEAL}), start=1):
        parties.sum_round(round, random_codes(9))
    assert len(added) > 300
    assert {*added.values(), *subtracted.values()} == {1}


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_whatever_groups_and_terms_clients_are_told_no_sum_is_of_fewer_than_three(
    data: st.DataObject,
) -> None:
    """Groups may be disjoint, but the values of a client are in one sum per round at most."""
    server = LyingServer(6)
    groups = st.sampled_from([{0, 1, 2}, {3, 4, 5}, {2, 3, 4, 5}, {0, 1, 2, 3, 4}, {*server.all}])
    few = st.sets(st.sampled_from(server.all), max_size=2)
    models = st.sampled_from([*5 * [b"a"], b"b"])
    for round, attempt in product((2, 3), (0, 1)):
        group = data.draw(groups | st.just(set()), "new group")
        claimed = data.draw(st.integers(round, round + 1), "for the round")
        for u in group:
            server.deal(u, group, claimed, deliver=True)
        for u in server.all:
            members = server.clients[u].group.members
            server.mask(u, round, attempt, members, basis=data.draw(models))
        lost = data.draw(few, "called lost by most")
        for u in server.all:
            other = data.draw(st.just(lost) | st.just(lost) | few, "called lost")
            server.consent(u, {*server.clients[u].current.cohort} - other)
        for u in {*server.all} - data.draw(few, "not asked"):
            server.reveal(u)
            missing = {*server.clients[u].current.survivors} - {u}
            server.recover(u, missing & {*server.clients[u].group.neighbors})
    for round in (2, 3):
        basis = server.curious.exposed(round)
        assert smallest_exposed_sum(basis) >= 3
        assert (np.abs(basis) > 1e-9).any(0).sum() >= 3 * len(basis)

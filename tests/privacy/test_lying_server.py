"""The server lies about who was lost: clients refuse, and no client's values are exposed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsift.privacy.secure.messages import MessageHeader, SecureStage, client_list
from privacy.curious import smallest_exposed_sum
from privacy.lying import LyingServer


def lie_about(server: LyingServer, victim: int, round: int = 2) -> None:
    """All mask; then the victim is told that nobody was lost, and all others that it was."""
    for u in server.all:
        assert server.mask(u, round, 0, server.all)
    for u in server.all:
        assert server.consent(u, server.all if u == victim else set(server.all) - {victim})


def test_a_client_that_is_called_lost_behind_its_back_reveals_nothing() -> None:
    server = LyingServer(6)
    lie_about(server, victim=2)
    assert server.reveal(2) is None
    others = [server.reveal(u) for u in server.all if u != 2]
    assert None not in others
    assert smallest_exposed_sum(server.curious.exposed(2)) == 5


def test_shares_of_a_client_whose_masks_were_given_away_are_refused() -> None:
    server = LyingServer(6)
    lie_about(server, victim=2)
    for u in (0, 1, 3, 4, 5):
        server.reveal(u)
        assert server.recover(u, [2]) is None
    for u in server.all:  # nor in a later round, in which it is not called lost
        server.mask(u, 3, 0, server.all)
    for u in server.all:
        server.consent(u, server.all)
    for u in (0, 1, 3, 4, 5):
        assert server.reveal(u)
        assert server.recover(u, [2]) is None
    assert smallest_exposed_sum(server.curious.exposed(2)) == 5


def test_masks_of_a_client_whose_shares_were_given_away_are_refused() -> None:
    server = LyingServer(6)
    for step in (
        lambda u: server.mask(u, 2, 0, server.all),
        lambda u: server.consent(u, server.all),
    ):
        for u in server.all:
            assert step(u)
    for u in (0, 1, 3, 4, 5):
        assert server.reveal(u)
        assert server.recover(u, [2])
    for u in server.all:
        server.mask(u, 3, 0, server.all)
    replies = [server.consent(u, set(server.all) - {2}) for u in (0, 1, 3, 4, 5)]
    assert replies == [None] * 5
    assert len(server.curious.exposed(3)) == 0


def test_a_client_signs_one_set_masks_once_and_never_repeats_a_round() -> None:
    server = LyingServer(6)
    for u in server.all:
        server.mask(u, 2, 0, server.all)
    assert server.mask(0, 2, 0, server.all) is None
    for u in server.all:
        server.consent(u, server.all)
    assert server.consent(0, set(server.all) - {5}) is None
    for u in server.all:
        assert server.reveal(u)
        assert server.mask(u, 2, 1, server.all) is None
        assert server.mask(u, 1, 7, server.all) is None


def test_sets_below_the_threshold_or_without_the_client_are_refused() -> None:
    server = LyingServer(6)
    assert server.mask(0, 2, 0, {0, 1, 2}) is None
    assert server.mask(0, 2, 0, {1, 2, 3, 4, 5}) is None
    for u in server.all:
        server.mask(u, 2, 0, server.all)
    assert server.consent(0, {0, 1, 2}) is None
    assert server.consent(0, {1, 2, 3, 4, 5}) is None


def test_nothing_is_recovered_before_a_sum_is_agreed_on() -> None:
    server = LyingServer(6)
    for u in server.all:
        server.mask(u, 2, 0, server.all)
    for u in server.all:
        server.consent(u, server.all)
    assert server.recover(0, [1]) is None


def test_dealing_new_shares_in_the_middle_of_a_round_ends_it() -> None:
    server = LyingServer(6)
    lie_about(server, victim=2)
    assert server.deal(0)
    assert server.reveal(0) is None
    assert server.recover(0, [1]) is None


def test_the_public_keys_of_a_client_never_change() -> None:
    server = LyingServer(4)
    before = dict(server.clients[0].public)
    request = bytes(MessageHeader(SecureStage.SHARES, 9, 0)) + client_list(server.all)
    assert server.ask(SecureStage.SHARES, 0, request + client_list([2]) + bytes(64)) is None
    assert server.refusals == ["the public keys of client 2 have changed"]
    assert server.clients[0].public == before


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_whatever_the_server_says_at_most_one_sum_per_round_is_exposed(data: st.DataObject) -> None:
    """All clients are honest; each is told something else, in several attempts and rounds."""
    server = LyingServer(5)
    sets = st.sets(st.sampled_from(server.all), min_size=3)
    for round in (2, 3):
        views = [*data.draw(st.lists(sets, min_size=1, max_size=2), "sets"), set(server.all)]
        for attempt in range(data.draw(st.integers(1, 2), "attempts")):
            cohorts = data.draw(st.sampled_from([server.all, *views]), "cohort")
            for u in server.all:
                server.mask(u, round, attempt, cohorts)
            for u in server.all:
                server.consent(u, data.draw(st.sampled_from(views)))
            for u in data.draw(st.permutations(server.all)):
                if data.draw(st.booleans()):
                    server.reveal(u)
                    server.recover(u, data.draw(st.sets(st.sampled_from(server.all))) - {u})
        if data.draw(st.booleans()):
            server.deal(data.draw(st.sampled_from(server.all)))
    for round in (2, 3):
        basis = server.curious.exposed(round)
        assert len(basis) <= 1
        assert smallest_exposed_sum(basis) > server.threshold


def test_a_client_refuses_a_group_that_is_too_small() -> None:
    """Two clients that collude with the server are enough in a group of three."""
    server = LyingServer(6, min_clients=5)
    assert server.deal(0, group=range(5))
    assert server.deal(0, group=range(4)) is None
    assert server.refusals == ["secure aggregation needs at least 5 clients per round, got 4"]


@pytest.mark.parametrize("deals", [False, True])
def test_keys_restored_later_do_not_open_an_attempt_without_a_sum(deals: bool) -> None:
    """All mask, then again without one client; afterward, every client's key is restored.

    The server may ask for new keys in between, and keep their shares.
    """
    server = LyingServer(6)
    others = set(server.all) - {5}
    for u in server.all:
        server.mask(u, 2, 0, server.all)
    if deals:
        for u in server.all:
            server.deal(u)
    for step in (lambda u: server.mask(u, 2, 1, others), lambda u: server.consent(u, others)):
        for u in others:
            step(u)
    for u in others:
        server.reveal(u)
    for round, lost in ((3, {0, 1}), (4, {2, 3}), (5, {4, 5})):
        for u in server.all:
            server.mask(u, round, 0, server.all)
        for u in server.all:
            server.consent(u, server.all)
        for u in set(server.all) - lost:
            server.reveal(u)
            server.recover(u, lost)
    basis = server.curious.exposed(2)
    assert len(basis) == 1
    assert smallest_exposed_sum(basis) >= 5

"""Each refusal of a client, one at a time: several of them stand in the way of most attacks."""

import pytest

from fedsift.privacy.secure.messages import MessageHeader, SecureStage, bitmap, varint
from fedsift.privacy.secure.primitives import SIGNATURE_BYTES, sign
from privacy.curious import smallest_exposed_sum
from privacy.lying import LyingServer

VICTIM = 2


def all_mask(server: LyingServer, round: int = 2) -> None:
    for u in server.all:
        assert server.mask(u, round, 0, server.all)


def all_consent(server: LyingServer, lost: set[int]) -> None:
    for u in set(server.all) - lost:
        assert server.consent(u, set(server.all) - lost)


def shown(server: LyingServer, u: int, signatures: dict[int, bytes]) -> bytes | None:
    """Ask a client to reveal its mask, with these signatures."""
    now, neighbors = server.clients[u].current, server.clients[u].group.neighbors
    request = bytes(MessageHeader(SecureStage.REVEAL, now.round, now.attempt))
    request += bitmap(signatures, neighbors) + b"".join(signatures[v] for v in sorted(signatures))
    return server.ask(SecureStage.REVEAL, u, request)


def test_a_share_that_is_delivered_again_does_not_undo_what_was_given_away() -> None:
    """A delivered share clears what its holder gave away before; an old one must not.

    The server holds the masks that all share with the victim, and asks for its shares.
    """
    server = LyingServer(6)
    all_mask(server)
    all_consent(server, lost={VICTIM})
    others = set(server.all) - {VICTIM}
    for u in others:
        assert server.reveal(u)
    dealt = server.parties.received[SecureStage.SHARES, VICTIM][0]
    neighbors = server.clients[VICTIM].group.neighbors
    for at, u in enumerate(neighbors):
        sealed = dealt[len(dealt) - 32 * (len(neighbors) - at) :][:32]
        server.waiting[u] = {VICTIM: varint(VICTIM) + varint(1) + sealed}
    for u in others:
        assert server.mask(u, 3, 0, server.all) is None
        assert server.refusals[-1] == f"clients [{VICTIM}] must share new keys first"
        assert server.recover(u, [VICTIM]) is None
    assert smallest_exposed_sum(server.curious.exposed(2)) == 5


def test_signatures_of_other_bytes_do_not_count() -> None:
    server = LyingServer(6)
    all_mask(server)
    all_consent(server, lost=set())
    forged = dict.fromkeys(server.clients[0].group.neighbors, bytes(SIGNATURE_BYTES))
    assert shown(server, 0, forged) is None
    another = {v: sign(server.clients[v].signing_key, b"another set") for v in forged}
    assert shown(server, 0, another) is None
    assert set(server.refusals) == {"client 1 has not signed the same set of clients"}


def test_signatures_of_clients_outside_of_the_set_do_not_count() -> None:
    """Two clients that collude with the server sign a set without them."""
    server = LyingServer(7)
    all_mask(server)
    for u in range(5):
        assert server.consent(u, range(5))
    view = server.clients[0]._view()
    signers = {v: sign(server.clients[v].signing_key, view) for v in (1, 2, 5, 6)}
    assert shown(server, 0, signers) is None
    assert server.refusals == ["client 5 has not signed the same set of clients"]


def test_a_client_that_has_not_signed_reveals_nothing() -> None:
    server = LyingServer(6)
    all_mask(server)
    assert server.reveal(0) is None
    assert server.refusals == ["this client has not signed a set of clients"]


def test_a_client_that_signed_another_set_deposits_no_more_masks() -> None:
    server = LyingServer(6)
    all_mask(server)
    assert server.consent(0, server.all) == server.consent(0, server.all)
    assert server.consent(0, set(server.all) - {VICTIM}) is None
    assert server.refusals == ["this client has signed another set"]


def test_shares_of_clients_outside_of_the_sum_are_refused() -> None:
    """The victim masked in an attempt of which the others know nothing."""
    server = LyingServer(6)
    others = set(server.all) - {VICTIM}
    assert server.mask(VICTIM, 2, 0, server.all)
    for step in (lambda u: server.mask(u, 2, 1, others), lambda u: server.consent(u, others)):
        for u in others:
            assert step(u)
    for u in others:
        assert server.reveal(u)
        assert server.recover(u, [VICTIM]) is None
    assert set(server.refusals) == {"a client is not in the sum"}


def test_a_client_that_left_an_attempt_needs_a_new_key() -> None:
    server = LyingServer(6)
    all_mask(server)
    assert server.mask(0, 2, 1, server.all) is None
    assert server.refusals == ["this client must share a new key first"]


def test_an_attempt_is_not_repeated_even_with_a_new_key() -> None:
    """Its pairwise masks would be used twice."""
    server = LyingServer(6)
    all_mask(server)
    assert server.deal(0, round=2)
    assert server.mask(0, 2, 0, server.all) is None
    assert server.refusals == ["this round was masked before"]


@pytest.mark.parametrize("gave", ["masks", "shares"])
def test_a_client_does_not_mask_with_a_neighbor_of_which_it_gave_something_away(gave: str) -> None:
    """Until that neighbor has shared a new key; nor with the neighbor's old share."""
    server = LyingServer(6)
    others = set(server.all) - {VICTIM}
    all_mask(server)
    all_consent(server, lost={VICTIM} if gave == "masks" else set())
    for u in others:
        assert server.reveal(u)
        assert (server.recover(u, [VICTIM]) is None) == (gave == "masks")
    for u in others:
        assert server.mask(u, 3, 0, server.all) is None
        assert server.refusals[-1] == f"clients [{VICTIM}] must share new keys first"
    server.deal(VICTIM, round=3, deliver=True)
    all_mask(server, 4)


@pytest.mark.parametrize("gave", ["masks", "shares"])
def test_a_client_never_gives_both_away_whatever_it_was_led_to_mask(gave: str) -> None:
    """The last line of defense, in a state that no server should be able to bring about."""
    server = LyingServer(6)
    all_mask(server)
    peer = server.clients[0].peers[VICTIM]
    if gave == "shares":
        peer.is_opened = True
        assert server.consent(0, set(server.all) - {VICTIM}) is None
        assert "cannot be left out of the sum" in server.refusals[-1]
        return
    all_consent(server, lost=set())
    assert server.reveal(0)
    peer.is_dropped = True
    assert server.recover(0, [VICTIM]) is None
    assert server.refusals[-1].endswith("were given away: their shares are not")

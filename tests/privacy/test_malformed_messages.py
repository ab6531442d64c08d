"""Malformed messages: refused in one line by clients, dropped by the server; nobody crashes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsift.privacy.secure import Refusal, SecureSettings, SecureSumStopped
from fedsift.privacy.secure.client import SecureClient
from fedsift.privacy.secure.exchange import reply_of
from fedsift.privacy.secure.messages import Reader, SecureStage, varint
from fedsift.privacy.secure.primitives import agree
from fedsift.privacy.secure.server import SecureServer
from privacy.parties import RUN, Parties, random_codes, weighted_sum


def require_one_line(problem: Exception) -> None:
    assert "\n" not in str(problem)


@st.composite
def damage(draw: st.DrawFn, message: bytes) -> bytes:
    """Cut, extend or change a message."""
    kind = draw(st.sampled_from(["cut", "extend", "flip", "replace"]))
    if kind == "cut":
        return message[: draw(st.integers(0, max(len(message) - 1, 0)))]
    if kind == "extend":
        return message + draw(st.binary(min_size=1, max_size=5))
    if kind == "replace":
        return draw(st.binary(max_size=200))
    at, bit = draw(st.integers(0, len(message) - 1)), draw(st.integers(0, 7))
    return bytes([*message[:at], message[at] ^ 1 << bit, *message[at + 1 :]])


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_the_server_drops_malformed_replies(data: st.DataObject) -> None:
    parties, codes = Parties(dict.fromkeys(range(6), 2)), random_codes(6, 5)
    target = data.draw(st.sampled_from([*SecureStage][:-1]), "stage")
    parties.lost = {5: SecureStage.REVEAL} if data.draw(st.booleans(), "one is lost") else {}
    altered = []

    def alter(stage: SecureStage, u: int, reply: bytes) -> bytes:
        if stage is not target or u != 1:
            return reply
        altered.append(data.draw(damage(reply), "reply"))
        return altered[-1]

    parties.alter = alter
    try:
        found, _ = parties.sum_round(1, codes)
    except SecureSumStopped as problem:
        require_one_line(problem)
        return
    assert not any("\n" in problem for problem in found.problems.values())
    if altered[0][3:] and len(altered[0]) == len(parties.received[target, 1][0]):
        return  # a flipped bit of a masked value or a key cannot be told from another value
    if 1 not in found.weights or target > SecureStage.MASKED:
        assert found.total.tolist() == weighted_sum(codes, found.weights).tolist()


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_clients_refuse_malformed_requests_in_one_line(data: st.DataObject) -> None:
    parties, codes = Parties(dict.fromkeys(range(4), 1)), random_codes(4, 5)
    target = data.draw(st.sampled_from([*SecureStage]), "stage")
    parties.lost = {3: SecureStage.REVEAL}
    answer = reply_of

    def damaged_reply(
        client: SecureClient, stage: SecureStage, request: bytes, codes: object
    ) -> bytes:
        if stage is target and client.client == 1:
            damaged = data.draw(damage(request), "request")
            try:
                answer(client, stage, damaged, codes)  # type: ignore[arg-type]
            except Refusal as problem:
                require_one_line(problem)
        return answer(client, stage, request, codes)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("privacy.parties.reply_of", damaged_reply)
        try:
            parties.sum_round(1, codes)
        except SecureSumStopped as problem:
            require_one_line(problem)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([*SecureStage]), st.binary(max_size=300), st.booleans())
def test_any_bytes_at_any_time_are_refused_or_answered(
    stage: SecureStage, request: bytes, has_header: bool
) -> None:
    client = SecureClient(RUN, 0, 1)
    header = bytes([stage]) + varint(1) + varint(0) if has_header else b""
    try:
        reply_of(client, stage, header + request, lambda: np.zeros(3, np.int64))
    except Refusal as problem:
        require_one_line(problem)
    else:
        assert stage is SecureStage.KEYS


def test_nothing_large_is_allocated_on_anyone_s_word() -> None:
    with pytest.raises(Refusal, match="too many clients"):
        Reader(varint(2**40) + b"1").clients()
    with pytest.raises(Refusal, match="too large"):
        Reader(b"\xff" * 12).varint()
    with pytest.raises(Refusal, match="too short"):
        Reader(b"1").take(2**62)


def test_a_key_that_gives_no_secret_is_refused() -> None:
    """X25519 with a point of small order gives a constant, which anyone knows."""
    parties = Parties(dict.fromkeys(range(4), 1))
    parties.alter = lambda stage, u, reply: (
        reply[:3] + bytes(32) + reply[35:] if (stage, u) == (SecureStage.KEYS, 2) else reply
    )
    found, _ = parties.sum_round(1, random_codes(4))
    assert sorted(found.weights) == [0, 1, 3]
    assert found.problems == {2: "a public key is not valid"}
    with pytest.raises(Refusal, match="a public key is not valid"):
        agree(bytes(range(32)), bytes(32))


@pytest.mark.parametrize("weight", [0, 2**21])
def test_weights_that_cannot_be_are_refused(weight: int) -> None:
    parties = Parties({0: 1, 1: 1, 2: 1, 3: weight, 4: 1})
    found, _ = parties.sum_round(1, random_codes(5))
    assert sorted(found.weights) == [0, 1, 2, 4]
    assert "a weight must be" in found.problems[3]


def test_values_beyond_the_agreed_magnitude_are_refused_by_the_client_itself() -> None:
    parties = Parties(dict.fromkeys(range(5), 1))
    codes = random_codes(5)
    codes[2] = np.full(12, 2**20)
    found, _ = parties.sum_round(1, codes)
    assert sorted(found.weights) == [0, 1, 3, 4]
    assert "do not fit" in parties.refusals[0][2]


def test_a_server_that_was_started_again_continues_above_its_attempts() -> None:
    parties = Parties(dict.fromkeys(range(5), 1), lost=dict.fromkeys(range(5), SecureStage.REVEAL))
    codes = random_codes(5)
    with pytest.raises(SecureSumStopped):
        parties.sum_round(1, codes)
    parties.server, parties.lost = SecureServer(RUN, SecureSettings(), first_attempt=1000), {}
    found, _ = parties.sum_round(1, codes)
    assert found.total.tolist() == weighted_sum(codes, found.weights).tolist()

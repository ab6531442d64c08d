"""What clients sign, and what their masks depend on, names everything they must agree on."""

from fedsift.privacy.secure import SecureSettings
from fedsift.privacy.secure.client import self_mask_key, share_context
from fedsift.privacy.secure.group import Group, roster_digest, terms_digest, view_digest

KEYS = {1: bytes(64), 2: bytes([1] * 64), 3: bytes([2] * 64)}
GROUP = Group((1, 2, 3), (2, 3), SecureSettings(2, 2), b"roster")


def assert_all_differ(function, base, changes):
    """Each change of one argument gives another result."""
    results = [function(*base)]
    for at, value in changes:
        results.append(function(*base[:at], value, *base[at + 1 :]))
    assert len(set(results)) == 1 + len(changes)
    assert function(*base) == results[0]


def test_a_roster_depends_on_run_settings_clients_and_keys():
    base = (b"run", SecureSettings(2, 2), KEYS)
    others = [SecureSettings(4, 2), SecureSettings(2, 3)]
    keys = [{**KEYS, 3: bytes([3] * 64)}, {1: KEYS[1], 2: KEYS[2], 4: KEYS[3]}, {1: KEYS[1]}]
    changes = [(0, b"another"), *((1, x) for x in others), *((2, x) for x in keys)]
    assert_all_differ(roster_digest, base, changes)


def test_terms_depend_on_group_round_attempt_cohort_bits_unit_and_basis():
    base = (GROUP, 5, 0, (1, 2, 3), 9, 1, b"model")
    other = Group(GROUP.members, GROUP.neighbors, GROUP.settings, b"another roster")
    changes = [(0, other), (1, 6), (2, 1), (3, (1, 2)), (4, 10), (5, 2), (6, b"another")]
    assert_all_differ(terms_digest, base, changes)


def test_a_signed_view_depends_on_the_terms_and_on_who_is_in_the_sum():
    base = (b"terms", (1, 2, 3), (1, 2, 3))
    assert_all_differ(view_digest, base, [(0, b"others"), (2, (1, 2))])


def test_keys_of_self_masks_and_shares_depend_on_their_purpose():
    assert_all_differ(
        self_mask_key,
        (bytes(16), b"run", 1, 5, 0),
        [(0, bytes([1] * 16)), (1, b"another"), (2, 2), (3, 6), (4, 1)],
    )
    changes = [(0, b"another"), (1, 2), (2, 1), (3, 7)]
    assert_all_differ(share_context, (b"run", 1, 2, 6), changes)

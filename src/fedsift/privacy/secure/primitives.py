"""The cryptographic primitives, all from the libraries ``cryptography`` and ``pycryptodome``.

X25519 agrees on keys, HKDF-SHA256 derives keys, AES-GCM encrypts, Ed25519 signs, AES-CTR expands
keys into masks, and Shamir's scheme over GF(2**128) shares keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedsift.privacy.secure.hashing import DOMAIN, encode_fields
from fedsift.privacy.secure.refusal import Refusal

KEY_BYTES = 16
"""The length of symmetric keys, of shared secrets and of their shares."""
PUBLIC_BYTES = 32
SIGNATURE_BYTES = 64
TAG_BYTES = 16
ONCE = bytes(12)
"""The nonce of keys that encrypt a single message each."""


def agreement_public_key(private: bytes) -> bytes:
    """Return the public key of key agreement."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, public: bytes) -> bytes:
    """Return the secret that two parties share; refuse public keys that give none."""
    try:
        peer = X25519PublicKey.from_public_bytes(public)
        return X25519PrivateKey.from_private_bytes(private).exchange(peer)
    except ValueError:
        raise Refusal("a public key is not valid") from None


def signing_public_key(private: bytes) -> bytes:
    """Return the public key of signatures."""
    return Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def sign(private: bytes, message: bytes) -> bytes:
    """Sign a message."""
    return Ed25519PrivateKey.from_private_bytes(private).sign(message)


def is_signed(public: bytes, signature: bytes, message: bytes) -> bool:
    """Whether a signature of a message is valid."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def derive(secret: bytes, *purpose: bytes | int | str) -> bytes:
    """Derive the key for one purpose from a secret.

    >>> derive(bytes(32), "mask", 1) != derive(bytes(32), "mask", 2)
    True
    """
    info = encode_fields(DOMAIN, *purpose)
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info).derive(secret)


def seal(key: bytes, message: bytes, context: bytes) -> bytes:
    """Encrypt and authenticate the only message of a key, bound to its context."""
    return AESGCM(key).encrypt(ONCE, message, context)


def unseal(key: bytes, sealed: bytes, context: bytes) -> bytes:
    """Decrypt what :func:`seal` returned, or refuse it."""
    try:
        return AESGCM(key).decrypt(ONCE, sealed, context)
    except (InvalidTag, ValueError):
        raise Refusal("an encrypted message was altered, or is meant for another round") from None


def split_secret(secret: bytes, threshold: int, shares: int) -> list[bytes]:
    """Share a secret of 16 bytes: any ``threshold`` shares restore it, fewer say nothing.

    >>> shares = split_secret(bytes(range(16)), threshold=2, shares=3)
    >>> combine_shares({2: shares[1], 3: shares[2]}) == bytes(range(16))
    True
    """
    return [share for _, share in Shamir.split(threshold, shares, secret, ssss=False)]


def combine_shares(shares: Mapping[int, bytes]) -> bytes:
    """Restore a secret from exactly ``threshold`` of its shares, by their number from 1."""
    restored: bytes = Shamir.combine(list(shares.items()), ssss=False)
    return restored


def mask_of(key: bytes, n: int, dtype: npt.DTypeLike) -> npt.NDArray[np.unsignedinteger]:
    """Expand a key into n unsigned integers of a type, by AES in counter mode."""
    kind = np.dtype(dtype).newbyteorder("<")
    stream = Cipher(AES(key), CTR(bytes(16))).encryptor().update(bytes(n * kind.itemsize))
    return np.frombuffer(stream, kind)


def add_masks(
    total: npt.NDArray[np.unsignedinteger], keys: Sequence[bytes], subtract: Sequence[bytes] = ()
) -> None:
    """Add the masks of some keys in place, and subtract those of others; both wrap around."""
    for key in keys:
        total += mask_of(key, len(total), total.dtype)
    for key in subtract:
        total -= mask_of(key, len(total), total.dtype)

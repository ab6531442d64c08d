"""Hashes of lists of fields."""

from __future__ import annotations

import hashlib

DOMAIN = "fedsift secure aggregation 1"
"""Separates the hashes and keys of this protocol from those of others."""


def encode_fields(*fields: bytes | int | str) -> bytes:
    """Return fields as bytes, such that no two lists of fields give the same bytes.

    >>> encode_fields("a", 1) != encode_fields("a1")
    True
    """
    found = []
    for field in fields:
        kind, content = _encode_field(field)
        found.append(kind + len(content).to_bytes(4, "little") + content)
    return b"".join(found)


def _encode_field(field: bytes | int | str) -> tuple[bytes, bytes]:
    if isinstance(field, bytes):
        return b"b", field
    return (b"s", field.encode()) if isinstance(field, str) else (b"i", str(field).encode())


def digest(*fields: bytes | int | str) -> bytes:
    """Return the SHA-256 hash of fields."""
    return hashlib.sha256(encode_fields(DOMAIN, *fields)).digest()

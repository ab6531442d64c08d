"""A client of secure aggregation as JSON, for clients whose processes end between messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fedsift.privacy.secure.client import Current, Peer, SecureClient
from fedsift.privacy.secure.group import Group
from fedsift.privacy.secure.settings import SecureSettings


def client_to_json(client: SecureClient) -> str:
    """Return everything that a client knows, including its private keys."""
    return json.dumps(asdict(client), default=lambda x: x.hex())


def client_from_json(text: str) -> SecureClient:
    """Return the client that :func:`client_to_json` wrote.

    >>> client = SecureClient(b"run", 3, 64)
    >>> client_from_json(client_to_json(client)) == client
    True
    """
    found = json.loads(text)
    group, current = found["group"], found["current"]
    return SecureClient(
        **with_bytes(found, "run", "agreement_key", "signing_key", "master")
        | {
            "settings": SecureSettings(**found["settings"]),
            "public": {int(v): bytes.fromhex(key) for v, key in found["public"].items()},
            "peers": {
                int(v): Peer(**with_bytes(peer, "public", "secret", "share"))
                for v, peer in found["peers"].items()
            },
            "group": Group(
                tuple(group["members"]),
                tuple(group["neighbors"]),
                SecureSettings(**group["settings"]),
                bytes.fromhex(group["roster"]),
                group["first_round"],
            ),
            "current": Current(
                current["round"],
                current["attempt"],
                tuple(current["cohort"]),
                bytes.fromhex(current["terms"]),
                bytes.fromhex(current["self_key"]),
                tuple(current["survivors"]),
                bytes.fromhex(current["consent"]),
            ),
        }
    )


def with_bytes(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return fields with those of these names converted from hexadecimal digits."""
    return {**fields, **{name: bytes.fromhex(fields[name]) for name in names}}

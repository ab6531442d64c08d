"""Bytes as a sequence of choices, so that a fuzzer of bytes changes what has a structure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")
ODD: tuple[Any, ...] = (
    None, True, 0, 1, -1, 2**31, 2**63 - 1, -(2**63), 2**70, 0.0, -0.0, 1e308,
    float("nan"), float("inf"), "", "w", "update", "0", "x" * 70_000, "\x1b[2J\n",
    "../../../tmp/x", b"", b"\0" * 9, [], [0] * 5000, [[]], {}, {"a": {}},
)  # fmt: skip
"""Values that programs tend not to expect."""


class Choices:
    """Reads choices from bytes; zeros follow at the end."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def number(self, below: int) -> int:
        """Return a number from 0 to below - 1."""
        width = max(1, ((below - 1).bit_length() + 7) // 8)
        taken = self.data[self.at : self.at + width]
        self.at += width
        return int.from_bytes(taken, "little") % below

    def one_of(self, items: Sequence[Item]) -> Item:
        """Return one of the items."""
        return items[self.number(len(items))]

    def take(self, most: int) -> bytes:
        """Return some of the next bytes."""
        size = self.number(most + 1)
        taken = self.data[self.at : self.at + size]
        self.at += size
        return taken

    def edited(self, body: bytes) -> bytes:
        """Return bytes with one piece replaced."""
        start = self.number(len(body) + 1)
        end = start + self.number(min(9, len(body) - start + 1))
        return body[:start] + self.take(9) + body[end:]

    def edited_json(self, value: Any) -> Any:
        """Return a JSON value with one place in it changed."""
        if isinstance(value, dict) and value and self.number(4):
            changed = dict(value)
            key = self.one_of(list(value))
            if not self.number(4):
                changed[str(self.one_of(ODD))] = changed.pop(key)
            else:
                changed[key] = self.edited_json(changed[key])
            return changed
        if isinstance(value, list) and value and self.number(4):
            place = self.number(len(value))
            return [*value[:place], self.edited_json(value[place]), *value[place + 1 :]]
        found = self.one_of(ODD)
        return found.decode("latin1") if isinstance(found, bytes) else found

"""Decisions from bytes: the same bytes always give the same decisions, so that a file is a case."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")
# Numbers that are likely to do harm where a size, an index or a count is expected.
EVIL = (
    0,
    1,
    -1,
    2,
    -2,
    3,
    7,
    8,
    15,
    16,
    17,
    63,
    64,
    65,
    255,
    256,
    4097,
    65536,
    2**31 - 1,
    -(2**31),
)
HUGE = (2**31, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, -(2**62), -(2**63))


class Draw:
    """Reads decisions off the front of some bytes; zeros follow their end."""

    def __init__(self, data: bytes) -> None:
        """Begin at the front."""
        self._data = data
        self._at = 0

    def byte(self) -> int:
        """Return the next byte."""
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def below(self, end: int) -> int:
        """Return a number in [0, ``end``)."""
        number = self.byte()
        for _ in range(max(end - 1, 0).bit_length() > 8 and (end - 1).bit_length() // 8):
            number = number << 8 | self.byte()
        return number % end

    def choice(self, items: Sequence[T]) -> T:
        """Return one of the items."""
        return items[self.below(len(items))]

    def often(self, share: float) -> bool:
        """Return True for that share of the bytes."""
        return self.byte() < 256 * share

    def number(self) -> int:
        """Return a number that may do harm."""
        kind = self.byte()
        if kind < 160:
            return self.choice(EVIL)
        return self.choice(HUGE) if kind < 208 else self.byte() - 128

    def rng(self) -> random.Random:
        """Return a generator seeded by the next two bytes."""
        return random.Random(self.byte() << 8 | self.byte())

    def rest(self) -> bytes:
        """Return all bytes that are left."""
        left = self._data[self._at :]
        self._at = len(self._data)
        return left


def any_leaf(tree: Any, draw: Draw) -> tuple[Any, Any] | None:
    """Return a container within nested dicts and lists, and the key of one of its entries."""
    found: tuple[Any, Any] | None = None
    while isinstance(tree, (dict, list)) and tree:
        keys: list[Any] = sorted(tree) if isinstance(tree, dict) else list(range(len(tree)))
        key = draw.choice(keys)
        found = tree, key
        tree = tree[key]
        if isinstance(tree, (dict, list)) and draw.often(0.1):
            break
    return found

"""Decisions that are determined by bytes, so that a file is a reproducible case."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")
# Edge cases of sizes, indices and counts.
EDGE_NUMBERS = (
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
HUGE_NUMBERS = (2**31, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, -(2**62), -(2**63))


class Draw:
    """Reads decisions from the begin of some bytes; after their end it reads zeros."""

    def __init__(self, data: bytes) -> None:
        """Begin at the first byte."""
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
        """Return True with this probability, in [0, 1]."""
        return self.byte() < 256 * share

    def number(self) -> int:
        """Return a number: of `EDGE_NUMBERS`, of `HUGE_NUMBERS`, or in [-128, 127]."""
        kind = self.byte()
        if kind < 160:
            return self.choice(EDGE_NUMBERS)
        return self.choice(HUGE_NUMBERS) if kind < 208 else self.byte() - 128

    def rng(self) -> random.Random:
        """Return a generator seeded by the next two bytes."""
        return random.Random(self.byte() << 8 | self.byte())

    def rest(self) -> bytes:
        """Return all remaining bytes."""
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

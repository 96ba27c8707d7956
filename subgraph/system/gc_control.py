"""Pausing Python's cyclic garbage collector while a large graph is made."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

# More objects than this go to the oldest generation unseen; after so many in all, the next time,
# all are looked through: what became garbage meanwhile stays no longer.
MANY = 10_000
# So many while the collector is kept out are looked through between two steps of the work.
WORTH_A_LOOK = 50_000
FEW_LOOKS = 3
TOO_MANY = 4_000_000

_looks = 0  # since all were looked through
_unseen = 0
_full_collections = 0


@contextmanager
def paused_gc() -> Generator[None]:
    """Keep the collector out while many objects are made, none of them garbage.

    It would look through all of them again and again: half of the time of a clone.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            _spare()
            gc.enable()


def look_at_new() -> None:
    """Free what became garbage since the collector was kept out, if much was made.

    A pass leaves the graph before it in cycles: of a large graph several would be held at a time.
    Only objects made since the last look are looked at; all are, after several looks, once the
    collector is let in.
    """
    global _looks
    if not gc.isenabled() and gc.get_count()[0] > WORTH_A_LOOK:
        gc.collect(1)
        _looks += 1


def _spare() -> None:
    """Let many new objects, which are there to stay, pass for old ones; sometimes look at all."""
    global _full_collections, _looks, _unseen
    if _looks > FEW_LOOKS:
        _looks, _unseen = 0, 0
        gc.collect()
        return
    made = gc.get_count()[0]
    if made < MANY or gc.get_freeze_count():
        return
    done = gc.get_stats()[2]["collections"]
    if done != _full_collections:  # somebody has looked at all meanwhile
        _full_collections, _unseen = done, 0
    if _unseen < TOO_MANY:
        _unseen += made
        gc.freeze()
        gc.unfreeze()
    else:
        gc.collect()

"""Control of Python's cyclic garbage collector while large graphs are made."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

# All are estimates. At the end of a `paused_gc` block at least this many new objects move to the
# oldest generation without a collection; fewer are left to Python.
MIN_PROMOTED_OBJECTS = 10_000
# After this many such objects the end of a block runs a full collection instead.
MAX_PROMOTED_OBJECTS = 4_000_000
# `collect_young` does nothing for fewer new objects.
MIN_COLLECTED_OBJECTS = 50_000
# After more such collections the end of the block runs a full collection.
MAX_YOUNG_COLLECTIONS = 3
# More frozen objects than these are a user's and stay frozen. Python 3.12 itself freezes immortal
# objects at each full collection (375 in Python 3.12.1).
_MAX_IMMORTAL_OBJECTS = 2_000

_young_collections = 0  # collections of the young generations since the last full one
_promoted = 0  # objects that went to the oldest generation since the last full collection
_full_collections = 0  # Python's count of full collections when _promoted was last reset


@contextmanager
def paused_gc() -> Generator[None]:
    """Disable the collector in the ``with`` block, which makes many objects and no garbage.

    The collector would traverse all of them repeatedly, which is half the time of a graph's clone.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            _promote_new_objects()
            gc.enable()


def collect_young() -> None:
    """Collect garbage among the new objects of a `paused_gc` block, if there are many.

    A pass leaves its input graph as cyclic garbage, and several copies of a large graph would take
    much memory. Only the young generations are collected. After several such collections the end of
    the block runs a full one.
    """
    global _young_collections
    if not gc.isenabled() and gc.get_count()[0] > MIN_COLLECTED_OBJECTS:
        gc.collect(1)
        _young_collections += 1


def _promote_new_objects() -> None:
    """Move many new objects to the oldest generation, or run a full collection if it is due."""
    global _full_collections, _young_collections, _promoted
    if _young_collections > MAX_YOUNG_COLLECTIONS:
        _young_collections, _promoted = 0, 0
        gc.collect()
        return
    made = gc.get_count()[0]
    if made < MIN_PROMOTED_OBJECTS or gc.get_freeze_count() > _MAX_IMMORTAL_OBJECTS:
        return
    done = gc.get_stats()[2]["collections"]
    if done != _full_collections:  # Python has run a full collection
        _full_collections, _promoted = done, 0
    if _promoted < MAX_PROMOTED_OBJECTS:
        _promoted += made
        gc.freeze()
        gc.unfreeze()
    else:
        gc.collect()

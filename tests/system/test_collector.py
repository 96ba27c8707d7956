"""Pausing the garbage collector: its state comes back, and large garbage does not stay for ever."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Generator

import pytest

from subgraph.system import gc_control
from subgraph.system.gc_control import collect_young, paused_gc


class Ring:
    """Garbage that only the cyclic collector finds."""

    def __init__(self) -> None:
        self.self = self


@pytest.fixture(autouse=True)
def enabled(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    monkeypatch.setattr(gc_control, "_young_collections", 0)
    monkeypatch.setattr(gc_control, "_promoted", 0)
    monkeypatch.setattr(gc_control, "MIN_PROMOTED_OBJECTS", 1_000)
    monkeypatch.setattr(gc_control, "MAX_PROMOTED_OBJECTS", 10_000)
    gc.unfreeze()  # nothing is promoted while others have frozen objects
    gc.collect()
    gc.enable()
    yield
    gc.enable()


def test_the_state_comes_back() -> None:
    with paused_gc():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    with paused_gc():
        pass
    assert not gc.isenabled()


def test_many_new_objects_are_old_at_once() -> None:
    with paused_gc():
        made = [[k] for k in range(5_000)]
    old = {id(thing) for thing in gc.get_objects(generation=2)}
    assert all(id(thing) in old for thing in made)


def test_garbage_goes_in_the_end() -> None:
    watched: list[weakref.ref[Ring]] = []
    for _ in range(6):
        with paused_gc():
            rings = [Ring() for _ in range(5_000)]
        watched.append(weakref.ref(rings[0]))
        del rings
    assert sum(ref() is not None for ref in watched) <= 3


def test_after_several_looks_all_are_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a pass leaves behind may be older than the look before it."""
    monkeypatch.setattr(gc_control, "MIN_COLLECTED_OBJECTS", 100)
    with paused_gc():
        ring = Ring()
        watched = weakref.ref(ring)
        made: list[list[int]] = []
        for _ in range(gc_control.MAX_YOUNG_COLLECTIONS + 1):
            made += [[k] for k in range(200)]
            collect_young()
        del ring
        assert watched() is not None
    assert watched() is None


def test_a_collection_meanwhile_counts() -> None:
    kept: list[list[list[int]]] = []
    for _ in range(3):
        gc.collect()
        before = gc.get_stats()[2]["collections"]
        with paused_gc():
            kept.append([[k] for k in range(6_000)])
        assert gc.get_stats()[2]["collections"] == before


def test_what_the_user_froze_stays_frozen() -> None:
    """Looked for by identity: other threads may free frozen objects meanwhile, so counts differ."""
    frozen = [[k] for k in range(100)]
    gc.freeze()
    try:
        with paused_gc():
            made = [[k] for k in range(5_000)]
        seen = {id(thing) for thing in gc.get_objects()}  # frozen objects are not among them
        assert not any(id(thing) in seen for thing in frozen)
        assert all(id(thing) in seen for thing in made), "what is new is not the user's to free"
    finally:
        gc.unfreeze()


def test_much_garbage_is_freed_while_the_collector_is_kept_out() -> None:
    with paused_gc():
        first = weakref.ref(Ring())
        gc_control.collect_young()
        assert first() is not None, "little is not looked for"
        # Twice as many as needed: other threads may free objects, which the count leaves out.
        rings = [Ring() for _ in range(2 * gc_control.MIN_COLLECTED_OBJECTS)]
        kept = rings[0]
        del rings
        gc_control.collect_young()
        assert first() is None
        assert kept.self is kept
    assert gc.isenabled()

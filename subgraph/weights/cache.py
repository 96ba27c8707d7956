"""The weight cache: objects computed from parameters, shared by all models, one per version.

A subgraph op requests an array, or any other object, from its `WeightCache` by a recipe, which is a
named function, and the parameters that it is computed from. All caches of the process share one
store: tied weights are converted once, and models over the same parameters share the results. A
result is freed when its last user is. An entry has results for versions of its parameters. Under a
pinned `Snapshot` it returns the result for the snapshot's versions; an older result lives only as
long as a running request uses it.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, TypeGuard, TypeVar

import attrs
import numpy as np

from subgraph.graph.parameters import Parameter, Snapshot, State, Unchecked, epoch, pinned_snapshot
from subgraph.graph.types import Array
from subgraph.system import guard_pages
from subgraph.system.forking import free_in_child
from subgraph.system.large_pages import aligned_empty
from subgraph.weights.recipe_ids import recipe_id

Make = Callable[..., Any]
Close = Callable[[Any], object]
_T = TypeVar("_T")
_log = logging.getLogger("subgraph")
_Key = tuple[str, tuple[Parameter, ...], int]
_Older = dict[tuple[int, ...], Callable[[], Any]]


@attrs.frozen
class WeightStats:
    """Counters of the cache.

    Attributes:
        entries: Number of entries, one for each recipe and sequence of parameters.
        bytes: Memory of their arrays, without views of parameters.
        hits: Number of requests that found a result.
        made: Number of first results of entries that were computed.
        redone: Number of results that were computed because a parameter had changed.
    """

    entries: int
    bytes: int
    hits: int
    made: int
    redone: int


# Counters of the whole process, without lock: CPython's GIL makes ``+= 1`` here atomic.
_totals = SimpleNamespace(hits=0, made=0, redone=0)
_store: weakref.WeakValueDictionary[_Key, WeightEntry] = weakref.WeakValueDictionary()
_store_lock = free_in_child(threading.Lock())


class _RetiredObject:
    """An older result that is no array; it is closed when no run can use its versions."""

    __slots__ = ("_close", "_value")

    def __init__(self, value: Any, close: Close | None) -> None:
        self._value = value
        self._close = close

    def __call__(self) -> Any:
        """Return the result, None once it is closed, like a weak reference."""
        return self._value

    def close(self) -> None:
        """Close the result."""
        value, self._value = self._value, None
        if value is not None:
            _close(value, self._close)

    def close_after(self, sources: Sequence[weakref.ref[Array]], states: Sequence[State]) -> None:
        """Close the result when an array of an older version is freed.

        A run that uses the result's versions has a snapshot, which holds all of ``sources``.

        Args:
            sources: The parameters' arrays from which the result was computed.
            states: The present states of the parameters, whose arrays do not count.
        """
        current = {id(state.array) for state in states}
        for source in sources:
            array = source()
            if array is None:
                self.close()
            elif id(array) not in current:
                weakref.finalize(array, self.close)


def _close(value: Any, close: Close | None) -> None:
    """Close a result by ``close``, or else by its method ``close`` or those of a tuple's parts."""
    if close is None and _is_tuple(value):
        for part in value:
            _close(part, None)
        return
    own = getattr(value, "close", None)
    try:
        if close is not None:
            close(value)
        elif callable(own):
            own()
    except Exception:
        _log.warning("closing %r of the weight cache failed", type(value).__name__, exc_info=True)


@attrs.define(eq=False)
class WeightEntry:
    """A recipe with its parameters, and the results for their versions; alive while referenced.

    ``get()`` costs one comparison while no parameter of the process has changed.

    Attributes:
        recipe: Id of the recipe, of `recipe_id`.
        make: The function of the recipe; its arguments are the arrays of the parameters.
        parameters: The parameters.
        align: Alignment of the arrays in bytes; 0: any.
        close: As of `WeightCache.get`.
        hits: Number of requests that found a result.
        made: 1 once the first result was computed, else 0.
        redone: Number of results that were computed after the first one.
    """

    recipe: str
    _make: Make
    parameters: tuple[Parameter, ...]
    align: int
    _close: Close | None = None
    hits: int = attrs.field(init=False, default=0)
    made: int = attrs.field(init=False, default=0)
    redone: int = attrs.field(init=False, default=0)
    _lock: threading.Lock = attrs.field(init=False, factory=lambda: free_in_child(threading.Lock()))
    # The epoch of the last `get`, and the newest result.
    _cached: tuple[int, Any] | None = attrs.field(init=False, default=None)
    # The versions of the newest result, and it.
    _newest: tuple[tuple[int, ...], Any] | None = attrs.field(init=False, default=None)
    # Weak references to older results by versions.
    _older: _Older = attrs.field(init=False, factory=_Older)
    # For a newest result that is no array: the arrays it was computed from, and a finalizer that
    # closes it with this entry.
    _sources: tuple[weakref.ref[Array], ...] = attrs.field(init=False, default=())
    _end: weakref.finalize[Any, Any] | None = attrs.field(init=False, default=None)

    def get(self) -> Any:
        """Return the result for the versions that this thread sees; arrays are read-only."""
        snapshot = pinned_snapshot()
        now = epoch() if snapshot is None else snapshot.epoch
        cached = self._cached
        if cached is not None and cached[0] == now:
            self.hits += 1
            _totals.hits += 1
            return cached[1]
        newest = self._newest
        if snapshot is not None and newest is not None and self._sees(snapshot, newest[0]):
            # A parameter of another entry has changed, the usual case.
            self._cached = (now, newest[1])
            self.hits += 1
            _totals.hits += 1
            return newest[1]
        return self._get_for(snapshot)

    def _sees(self, snapshot: Snapshot, versions: tuple[int, ...]) -> bool:
        """Return whether a snapshot has these versions of the parameters."""
        states = snapshot.states
        for parameter, version in zip(self.parameters, versions, strict=True):
            seen = states.get(parameter)
            if seen is None or seen.version != version:
                return False
        return True

    def _get_for(self, snapshot: Snapshot | None) -> Any:
        latest = Snapshot(self.parameters)
        states: list[State] = []
        for parameter in self.parameters:
            seen = None if snapshot is None else snapshot.states.get(parameter)
            states.append(latest.states[parameter] if seen is None else seen)
        versions = tuple(state.version for state in states)
        with self._lock:
            result = self._find(versions)
            if result is None:
                result = self._compute(states)
                self._store(versions, states, result)
            else:
                self.hits += 1
                _totals.hits += 1
            if self._newest is not None and self._newest[0] == versions:
                self._cached = ((latest if snapshot is None else snapshot).epoch, result)
        return result

    def _find(self, versions: tuple[int, ...]) -> Any:
        if self._newest is not None and self._newest[0] == versions:
            return self._newest[1]
        older = self._older.get(versions)
        return None if older is None else older()

    def _compute(self, states: Sequence[State]) -> Any:
        try:
            result = self._make(*map(_recipe_argument, states))
        except Exception as error:
            names = ", ".join(repr(p.name) for p in self.parameters)
            error.add_note(f"while recipe {self.recipe!r} was applied to parameters {names}")
            raise
        if self._newest is None:
            self.made += 1
            _totals.made += 1
        else:
            self.redone += 1
            _totals.redone += 1
        return _read_only_result(result, self.align)

    def _store(self, versions: tuple[int, ...], states: Sequence[State], result: Any) -> None:
        newest = self._newest
        self._older = {v: ref for v, ref in self._older.items() if ref() is not None}
        sources = () if _is_array(result) else tuple(weakref.ref(s.array) for s in states)
        # Snapshots are ordered, so versions of one set of parameters are comparable.
        if newest is None or versions > newest[0]:
            if newest is not None:
                self._older[newest[0]] = self._retired(newest[1], self._sources)
            self._newest, self._sources = (versions, result), sources
            if self._end is not None:
                self._end.detach()
            self._end = weakref.finalize(self, _close, result, self._close) if sources else None
        else:
            self._older[versions] = self._retired(result, sources)

    def _retired(self, result: Any, sources: Sequence[weakref.ref[Array]]) -> Callable[[], Any]:
        """Return a weak reference to an older result, alive while a running request may use it."""
        if _is_array(result):
            return weakref.ref(result)
        held = _RetiredObject(result, self._close)
        held.close_after(sources, [parameter.published for parameter in self.parameters])
        return held

    def seed(self, result: Array) -> None:
        """Set the result for the present versions to an array from a file, without a copy."""
        versions = tuple(p.version for p in self.parameters)
        with self._lock:
            if self._newest is None:
                self._newest = (versions, read_only(result, self.align))

    @property
    def bytes(self) -> int:
        """Bytes of the arrays of all results, without views of parameters and other objects."""
        with self._lock:
            alive = [ref() for ref in self._older.values()]
            if self._newest is not None:
                alive.append(self._newest[1])
        sources = [p.state.memory for p in self.parameters]
        return sum(
            array.nbytes
            for result in alive
            for array in _arrays(result)
            if not any(np.may_share_memory(array, s) for s in sources)
        )


class ChangedEntries:
    """Finds the entries of a list whose parameters have changed, faster than `get` of each one."""

    def __init__(self, entries: Sequence[WeightEntry]) -> None:
        """Watch ``entries``; initially all count as changed."""
        self._all = range(len(entries))
        self._users: dict[Parameter, list[int]] = {}
        for index, entry in enumerate(entries):
            for parameter in entry.parameters:
                self._users.setdefault(parameter, []).append(index)
        self._epoch: int | None = None
        self._newest = self._seen_newest = 0

    def indices(self, snapshot: Snapshot) -> Sequence[int]:
        """Return which entries changed since `mark_fetched`, under a pinned snapshot."""
        states = snapshot.states
        versions = [
            p.version if (state := states.get(p)) is None else state.version for p in self._users
        ]
        self._seen_newest = max(versions, default=0)
        if self._epoch is None or snapshot.epoch < self._epoch:
            return self._all
        # Versions only grow: a parameter has changed if its version exceeds all versions seen.
        newest = self._newest
        newer = (u for u, n in zip(self._users.values(), versions, strict=True) if n > newest)
        return sorted({index for users in newer for index in users})

    def mark_fetched(self, snapshot: Snapshot) -> None:
        """Record that the caller has fetched the entries of `indices`."""
        self._newest, self._epoch = self._seen_newest, snapshot.epoch


class WeightCache:
    """One user's view of the cache; it keeps the entries that it has requested alive.

    A recipe is identified by its name and its function, with what that holds: numbers and strings
    in its closure, the attributes that a bound method reads (see `subgraph.weights.recipe_ids`).
    Arrays in a closure are not part of the identity: pass them as parameters.
    """

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        """Make a view without entries."""
        self._entries: dict[_Key, WeightEntry] = {}

    def get(
        self,
        recipe: str,
        make: Callable[..., _T],
        *parameters: Parameter,
        align: int = 0,
        close: Callable[[_T], object] | None = None,
    ) -> _T:
        """Return ``make(*arrays of the parameters)``, from the cache if it is there.

        Args:
            recipe: Name of the result, such as a memory layout: "OIhw16i16o".
            make: Function of the parameters' arrays; it returns an array, a tuple of arrays, or any
                other object, such as a session or a handle.
            parameters: All parameters that the result depends on.
            align: Addresses of arrays are multiples of this number of bytes; 0: any address.
            close: Called with a result that is no array when it is freed: after the last user of
                the entry, or after the last run that uses its version. None: the method ``close``
                of the result, or of each part of a tuple, where there is one.

        Returns:
            The result for the versions that this thread uses (see `pinned`); arrays are read-only.
        """
        made: _T = self.entry(recipe, make, *parameters, align=align, close=close).get()
        return made

    def entry(
        self,
        recipe: str,
        make: Make,
        *parameters: Parameter,
        align: int = 0,
        close: Close | None = None,
    ) -> WeightEntry:
        """Return the entry of a recipe, whose ``get`` needs no look-up.

        Args:
            recipe: Name of the result.
            make: Function of the parameters' arrays.
            parameters: All parameters that the result depends on.
            align: Addresses of arrays are multiples of this number of bytes; 0: any address.
            close: As of `get`.
        """
        key = (recipe_id(recipe, make), parameters, align)
        entry = self._entries.get(key)
        if entry is None:
            with _store_lock:
                entry = _store.get(key)
                if entry is None:
                    entry = WeightEntry(key[0], make, parameters, align, close)
                    _seed_from_files(entry, align)
                    _store[key] = entry
            self._entries[key] = entry
        return entry

    def hold(self, entry: WeightEntry) -> None:
        """Keep an entry alive that another user has requested."""
        self._entries[entry.recipe, entry.parameters, entry.align] = entry

    def __iter__(self) -> Iterator[WeightEntry]:
        """Yield the requested entries."""
        return iter(list(self._entries.values()))

    def stats(self) -> WeightStats:
        """Return the counters of the requested entries."""
        return _stats(list(self._entries.values()))

    def clear(self) -> None:
        """Release all entries."""
        self._entries.clear()


def weight_stats() -> WeightStats:
    """Return the counters of the whole process; hits, made and redone include freed entries."""
    with _store_lock:
        alive = list(_store.values())
    stats = _stats(alive)
    return WeightStats(stats.entries, stats.bytes, _totals.hits, _totals.made, _totals.redone)


def _stats(entries: Sequence[WeightEntry]) -> WeightStats:
    return WeightStats(
        len(entries),
        sum(e.bytes for e in entries),
        sum(e.hits for e in entries),
        sum(e.made for e in entries),
        sum(e.redone for e in entries),
    )


class StoredWeights:
    """Results of an exported model, which new entries of equal recipes use; while referenced."""

    def __init__(self) -> None:
        """Make an empty collection."""
        self._results: dict[_Key, tuple[tuple[int, ...], Unchecked]] = {}
        with _store_lock:
            _stored.add(self)

    def add(
        self,
        recipe: str,
        parameters: tuple[Parameter, ...],
        align: int,
        result: Array | Unchecked,
    ) -> None:
        """Add a result, which is used while the parameters have their present versions.

        Args:
            recipe: Id of the recipe, of `recipe_id`.
            parameters: The parameters that the result depends on.
            align: Alignment of the entry in bytes.
            result: The array, possibly with a checksum to verify at the first read.
        """
        versions = tuple(p.version for p in parameters)
        held = result if isinstance(result, Unchecked) else Unchecked(result)
        self._results[recipe, parameters, align] = (versions, held)

    def find(self, entry: WeightEntry, align: int) -> Array | None:
        """Return the result for an entry; None if there is none, or a parameter has changed.

        Raises:
            BlobError: the checksum of the result does not match the file.
        """
        found = self._results.get((entry.recipe, entry.parameters, align))
        if found is None or found[0] != tuple(p.version for p in entry.parameters):
            return None
        return found[1].read()


_stored: weakref.WeakSet[StoredWeights] = weakref.WeakSet()


def _seed_from_files(entry: WeightEntry, align: int) -> None:
    for stored in list(_stored):
        found = stored.find(entry, align)
        if found is not None:
            entry.seed(found)
            return


def _recipe_argument(state: State) -> Array:
    """Return a parameter's array; with guard pages a copy, because recipes run kernels on it."""
    return guard_pages.guarded_copy(state.array) if guard_pages.MODE else state.array


def _is_array(item: Any) -> TypeGuard[Array]:
    return isinstance(item, (np.ndarray, np.generic))


def _is_tuple(item: Any) -> TypeGuard[tuple[Any, ...]]:
    return type(item) is tuple  # not a child class, which may have more than items


def _arrays(result: Any) -> list[Array]:
    """Return the arrays of a result, which is an array, a tuple of arrays, or another object."""
    parts = result if _is_tuple(result) else (result,)
    return [part for part in parts if _is_array(part)]


def _read_only_result(result: Any, align: int) -> Any:
    """Return a recipe's result with its array, or the arrays of a tuple, read-only."""
    if _is_tuple(result):
        return tuple([_read_only_result(part, align) for part in result])
    return read_only(np.asarray(result), align) if _is_array(result) else result


def read_only(array: Array, align: int) -> Array:
    """Return a read-only view of ``array`` or, if it is not aligned, of an aligned copy.

    Args:
        array: An array that the cache owns.
        align: Alignment in bytes, also requires contiguity; 0: any.
    """
    if guard_pages.MODE:
        return guard_pages.guarded_copy(array)
    if align and (not array.flags.c_contiguous or array.ctypes.data % align):
        copy = aligned_empty(array.shape, array.dtype, align)
        copy[...] = array
        array = copy
    view = array.view()
    view.flags.writeable = False
    return view

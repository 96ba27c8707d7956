"""Parameters: named arrays with versions, changed atomically while requests run.

A parameter's state, ``(version, array)``, is immutable: a change publishes a new state. Versions
are stamps of one process-wide counter, so a replaced array can never pass for the old one. A
request takes a `Snapshot` when it starts and runs under `pinned`; it then sees one consistent set
of states from start to end: all of a transaction or none of it (multiversion concurrency).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from subgraph.errors import MissingInputError, ModelError, ShapeError
from subgraph.graph.result_arrays import read_only
from subgraph.graph.types import Array, TensorType, dtype_of
from subgraph.system.forking import free_in_child, held_while_forking
from subgraph.system.registry import nearest


class Checksums(Protocol):
    """The checksums of a file, one for each leaf (a block of its bytes; see `devices.blob`)."""

    def check(self, leaves: Iterable[int]) -> None:
        """Compare these leaves of the file with their checksums.

        Raises:
            BlobError: the file is damaged.
        """
        ...


class Unchecked:
    """An array of a file whose bytes are compared with their checksums when it is first read.

    Attributes:
        array: The array, for its address, dtype and shape only; `read` returns it for its elements.
    """

    __slots__ = ("_checksums", "_leaves", "array")

    def __init__(
        self, array: Array, checksums: Checksums | None = None, leaves: Sequence[int] = ()
    ) -> None:
        """Make an array that is not checked yet.

        Args:
            array: The array; made read-only.
            checksums: The checksums of its file; None: it needs no check.
            leaves: Indices of the leaves of the file that hold the array.
        """
        self.array: Array = read_only(array)
        self._checksums = checksums
        self._leaves = leaves

    def read(self) -> Array:
        """Return the array after comparing it with its checksums.

        Raises:
            BlobError: the bytes are not those that were written.
        """
        if self._checksums is not None:
            self._checksums.check(self._leaves)
            self._checksums = None
        return self.array

    @property
    def is_checked(self) -> bool:
        """Whether the checksums were compared already, or there are none."""
        return self._checksums is None

    @staticmethod
    def check_all(arrays: Iterable[Unchecked]) -> None:
        """Check several arrays, those of one file together so that threads can share the work.

        Raises:
            BlobError: the bytes of an array are not those that were written.
        """
        by_file: dict[Checksums, list[Unchecked]] = {}
        for each in arrays:
            if each._checksums is not None:
                by_file.setdefault(each._checksums, []).append(each)
        for checksums, found in by_file.items():
            checksums.check([leaf for each in found for leaf in each._leaves])
            for each in found:
                each._checksums = None


class State(NamedTuple):
    """One published state of a parameter.

    Attributes:
        version: The version stamp.
        held: The read-only array, possibly one of a file that is not checked yet.
    """

    version: int
    held: Array | Unchecked

    @property
    def array(self) -> Array:
        """The array; an array of a file is checked at its first use.

        Raises:
            BlobError: the file is damaged.
        """
        return self.held.read() if isinstance(self.held, Unchecked) else self.held

    @property
    def memory(self) -> Array:
        """The array for its address and size only: its elements may not be checked yet."""
        return self.held.array if isinstance(self.held, Unchecked) else self.held


class _Local(threading.local):
    """A thread's view of parameters.

    Attributes:
        changes: Number of transactions of this thread that changed a parameter.
        staged: Arrays that the open transaction has assigned; None outside of a transaction.
        pinned: The snapshot that this thread reads from, or None.
    """

    changes: int = 0
    staged: dict[Parameter, Array] | None = None
    pinned: Snapshot | None = None


_local = _Local()
# A transaction holds this lock from start to end; readers never wait for it.
_writers = free_in_child(threading.RLock())
# Held only while states are published or collected.
_publish = held_while_forking(threading.Lock(), inner=True)
_stamp = 0
_epoch = 0


def epoch() -> int:
    """Return the stamp of the newest change of any parameter in the process (0: none yet)."""
    return _epoch


def _copy_of(array: npt.ArrayLike) -> Array:
    """Return a copy in this machine's byte order.

    Raises:
        ValueError: ``array`` holds objects, or lists of different lengths.
    """
    copy = np.array(array)
    if copy.dtype == object and not all(isinstance(item, (str, bytes)) for item in copy.flat):
        raise ValueError(f"{array!r} is an array of objects; give numbers or strings")
    return copy if copy.dtype.isnative else copy.astype(copy.dtype.newbyteorder("="))


class Parameter:
    """A weight: a name and a versioned array of fixed dtype and shape.

    Parameters are shared by graphs, never copied; they compare by identity.

    Attributes:
        name: Its name in every graph that uses it.
        published: The newest state; a running request reads `state` instead, which may be older.
    """

    __slots__ = ("__weakref__", "_first", "_type", "name", "published")

    def __init__(self, name: str, array: npt.ArrayLike) -> None:
        """Make a parameter that holds a copy of ``array``.

        Raises:
            ShapeError: its dtype is not one of ONNX's.
        """
        try:
            held = _copy_of(array)
        except (TypeError, ValueError) as error:
            raise ShapeError(f"parameter {name!r}: {error}") from error
        self._adopt(name, held)

    @classmethod
    def adopt(cls, name: str, array: Array | Unchecked) -> Parameter:
        """Make a parameter over ``array`` itself, not a copy; the caller must not change it."""
        self = cls.__new__(cls)
        self._adopt(name, array)
        return self

    def _adopt(self, name: str, array: Array | Unchecked) -> None:
        global _stamp
        self.name = name
        shown = array.array if isinstance(array, Unchecked) else array
        self._type = TensorType(dtype_of(shown), shown.shape)
        with _publish:
            # A unique stamp, but no new epoch: no plan depends on a new parameter yet.
            _stamp += 1
            held = array if isinstance(array, Unchecked) else read_only(array)
            self._first = _stamp
            self.published = State(_stamp, held)

    def __array__(self, *_: Any, **__: Any) -> Array:
        # Without this method NumPy makes an array of one object, and its errors do not say why.
        raise TypeError(f"parameter {self.name!r} is a weight and no array: use its .array")

    @property
    def type(self) -> TensorType:
        """Dtype and shape; they never change."""
        return self._type

    @property
    def is_changed(self) -> bool:
        """Whether this thread sees another array than the first one, from which types follow."""
        return self.version != self._first

    @property
    def nbytes(self) -> int:
        """Size of the array in bytes."""
        return self.published.memory.nbytes

    @property
    def state(self) -> State:
        """Version and array, read together."""
        snapshot = _local.pinned
        if snapshot is not None:
            pinned = snapshot.states.get(self)
            if pinned is not None:
                return pinned
        return self.published

    @property
    def array(self) -> Array:
        """Read-only view of the array; inside a transaction, the array assigned there."""
        # A request that runs inside a transaction block has pinned its snapshot and must not see a
        # part of the transaction.
        if _local.pinned is None and _local.staged is not None and self in _local.staged:
            staged: Array = read_only(_local.staged[self])
            return staged
        return self.state.array

    @property
    def version(self) -> int:
        """Stamp of the last published change; later changes have greater stamps."""
        return self.state.version

    def assign(self, array: npt.ArrayLike) -> None:
        """Replace the array by a copy of ``array``.

        Raises:
            ShapeError: dtype or shape differ from the parameter's, or ``array`` is not an array.
        """
        try:
            new = _copy_of(array)
        except (TypeError, ValueError) as error:
            raise ShapeError(f"parameter {self.name!r} takes {self._type}: {error}") from error
        if (dtype_of(new), new.shape) != (self._type.dtype, self._type.shape):
            raise ShapeError(
                f"parameter {self.name!r} is {self._type}, got "
                f"{TensorType(dtype_of(new), new.shape)}; dtype and shape of a parameter are "
                "fixed: convert the array, or build the graph anew"
            )
        if _local.staged is not None:  # a nested transaction would copy the whole table
            _staged()[self] = new
            return
        with transaction():
            _staged()[self] = new

    @contextmanager
    def update(self) -> Generator[Array]:
        """Yield a writable copy of the array; publish its content when the block ends.

        Nothing is published if the block raises. The parameter shares no memory with what the
        caller still holds of the array, which takes a second copy; `assign`, to replace all
        elements, makes one.

        Raises:
            ShapeError: the block wrote objects that are no text into an array of strings.
        """
        with transaction():
            new = np.array(self.array)
            view = new.view()  # whose shape, dtype and size are not those of the parameter
            yield view
            view.flags.writeable = False  # writing to it later would have no effect
            self.assign(new)

    def __repr__(self) -> str:
        return f"<Parameter {self.name!r} {self._type} version {self.version}>"


def _staged() -> dict[Parameter, Array]:
    staged = _local.staged
    assert staged is not None, "only called inside transaction()"
    return staged


@contextmanager
def transaction() -> Generator[None]:
    """Publish all changes made in the block at once; none if the block raises.

    Transactions of several threads run one after the other. A nested one joins the outer one, which
    publishes its changes; if it raises, the outer one continues without them.
    """
    if _local.staged is not None:
        before = dict(_local.staged)
        try:
            yield
        except BaseException:
            _local.staged = before
            raise
        return
    # Writers exclude each other for the whole block, since each may read before it writes. Readers
    # need not wait: they see published states, which never change.
    with _writers:
        _local.staged = {}
        try:
            yield
            staged = _local.staged
        finally:
            # An error in the block leaves here, before the commit, so nothing of it is published.
            _local.staged = None
        _commit(staged)


def _commit(staged: dict[Parameter, Array]) -> None:
    global _stamp, _epoch
    if not staged:
        return
    with _publish:
        for parameter, array in staged.items():
            _stamp += 1
            parameter.published = State(_stamp, read_only(array))
        # The epoch changes last and under the lock, so that no snapshot has a new epoch with old
        # states.
        _epoch = _stamp
    _local.changes += 1


def changes_by_thread() -> int:
    """Return the number of transactions in which this thread changed parameters."""
    return _local.changes


class Snapshot:
    """States of some parameters at one moment, between transactions.

    Attributes:
        epoch: Stamp of the newest change of any parameter at that moment.
        states: The state of each parameter.
    """

    __slots__ = ("epoch", "states")

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        """Collect the published states of ``parameters``."""
        with _publish:
            self.epoch = _epoch
            self.states = {p: p.published for p in parameters}


class pinned:
    """A ``with`` block in which this thread reads parameters from a snapshot."""

    __slots__ = ("_outer", "_snapshot")

    def __init__(self, snapshot: Snapshot | None) -> None:
        """Read from ``snapshot``; None: read the newest states."""
        self._snapshot = snapshot

    def __enter__(self) -> None:
        self._outer = _local.pinned
        _local.pinned = self._snapshot

    def __exit__(self, *_: object) -> None:
        _local.pinned = self._outer


def call_pinned(snapshot: Snapshot, function: Callable[[Any], Any], argument: Any) -> Any:
    """Return ``function(argument)``, run as inside `pinned` but with less overhead.

    Args:
        snapshot: The states that the function reads.
        function: Runs in this thread.
        argument: Its argument.
    """
    outer = _local.pinned
    _local.pinned = snapshot
    try:
        return function(argument)
    finally:
        _local.pinned = outer


def unstaged() -> pinned:
    """Return a ``with`` block in which this thread reads no arrays of an open transaction.

    What is derived from an array with its version must not hold one that may never be published.
    """
    outer = _local.pinned
    return pinned(Snapshot(()) if outer is None and _local.staged is not None else outer)


def pinned_snapshot() -> Snapshot | None:
    """Return the snapshot that this thread reads from, for a helper thread to pin as well."""
    return _local.pinned


class Versions:
    """Versions of the parameters on whose content a plan or a fused graph depends.

    Attributes:
        read: Each parameter with the version that was read.
    """

    def __init__(self, read: Iterable[tuple[Parameter, int]]) -> None:
        """Store the versions that were read."""
        self.read = tuple(read)
        self._checked_epoch = -1

    def are_current(self) -> bool:
        """Return whether this thread still sees these versions; compared once for each epoch."""
        snapshot = _local.pinned
        stamp = _epoch if snapshot is None else snapshot.epoch
        # Parameters rarely change, so that most runs compare one number instead of all versions.
        if stamp != self._checked_epoch:
            if any(parameter.version != version for parameter, version in self.read):
                return False
            self._checked_epoch = stamp
        return True


class ParameterTable(dict[str, Parameter]):
    """Parameters by name; looking up another name is an error that lists the nearest."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Parameter:
        return super().__getitem__(name) if isinstance(name, str) else self.__missing__(name)  # pyright: ignore[reportUnnecessaryIsInstance]

    def __missing__(self, name: object) -> Parameter:
        raise MissingInputError(f"there is no parameter {name!r}; {nearest(str(name), self)}")


def collect_parameters(
    values: Iterable[Any], nodes: Iterable[Any], graph: str
) -> dict[str, Parameter]:
    """Return the parameters of a graph by name.

    Args:
        values: The graph's values.
        nodes: The graph's nodes; the parameters of their bodies are added.
        graph: The graph's name, for the error.

    Raises:
        ModelError: Two different parameters have the same name.
    """
    found: dict[str, Parameter] = ParameterTable()
    used: list[Parameter] = []
    for value in values:
        if value.parameter is not None:
            used.append(value.parameter)
    for node in nodes:
        if node.attrs:
            for body in node.bodies:
                used += body.parameters.values()
    for parameter in used:
        if found.setdefault(parameter.name, parameter) is not parameter:
            raise ModelError(
                f"graph {graph!r} has two different parameters named {parameter.name!r}; rename one"
            )
    return found

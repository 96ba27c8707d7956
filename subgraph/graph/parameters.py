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
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from subgraph.errors import MissingInputError, ModelError, ShapeError
from subgraph.graph.types import Array, TensorType, dtype_of
from subgraph.system.forking import free_in_child, held_while_forking
from subgraph.system.registry import nearest


class Checksums(Protocol):
    """The checksums of a file."""

    def check(self, leaves: Iterable[int]) -> None:
        """Compare some of the file's leaves with their checksums.

        Raises:
            BlobError: the file is damaged.
        """
        ...


class Unchecked:
    """An array of a file whose bytes are compared with their checksums when it is first read.

    Attributes:
        array: The array, for its address, dtype and shape; its elements come from `read`.
    """

    __slots__ = ("_checksums", "_leaves", "array")

    def __init__(
        self, array: Array, checksums: Checksums | None = None, leaves: Sequence[int] = ()
    ) -> None:
        """Take an array and the leaves of a file that hold it; without a file it is checked."""
        self.array = _read_only(array)
        self._checksums = checksums
        self._leaves = leaves

    def read(self) -> Array:
        """Return the array, checked.

        Raises:
            BlobError: its bytes are not those that were written.
        """
        if self._checksums is not None:
            self._checksums.check(self._leaves)
            self._checksums = None
        return self.array

    @property
    def is_checked(self) -> bool:
        """Whether `read` has found it whole."""
        return self._checksums is None

    @staticmethod
    def check_all(arrays: Iterable[Unchecked]) -> None:
        """Check several arrays at once, which several threads do.

        Raises:
            BlobError: the bytes of one of them are not those that were written.
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
    """One published state of a parameter: its version stamp and its read-only array."""

    version: int
    held: Array | Unchecked

    @property
    def array(self) -> Array:
        """The array; one of a file is checked when it is first asked for.

        Raises:
            BlobError: the file is damaged.
        """
        return self.held.read() if isinstance(self.held, Unchecked) else self.held

    @property
    def memory(self) -> Array:
        """The array for its address and size alone: its elements may not be checked yet."""
        return self.held.array if isinstance(self.held, Unchecked) else self.held


class _Local(threading.local):
    """Per-thread view: the states that a transaction has staged, the snapshot that is pinned."""

    changes: int = 0
    staged: dict[Parameter, Array] | None = None
    pinned: Snapshot | None = None


_local = _Local()
# Writers take turns (a transaction is one turn); readers never wait for them.
_writers = free_in_child(threading.RLock())
# Held for the few instructions that publish or collect states.
_publish = held_while_forking(threading.Lock(), inner=True)
_stamp = 0
_epoch = 0


def epoch() -> int:
    """Return the stamp of the newest change of any parameter in the process (0: none yet)."""
    return _epoch


def _read_only(array: Array) -> Array:
    view = array.view()
    view.flags.writeable = False
    return view


class Parameter:
    """A weight: a name and a versioned array of fixed dtype and shape.

    Parameters are shared by graphs, never copied; they compare by identity.

    Attributes:
        name: Its name in every graph that uses it.
        published: The newest state; a running request reads `state` instead, which may be older.
    """

    __slots__ = ("__weakref__", "_type", "name", "published")

    def __init__(self, name: str, array: npt.ArrayLike) -> None:
        """Make a parameter that holds a copy of ``array``.

        Raises:
            ShapeError: its dtype is not one of ONNX's.
        """
        held = np.array(array)
        if held.dtype == object and not all(isinstance(item, (str, bytes)) for item in held.flat):
            raise ShapeError(f"parameter {name!r}: an array of objects; give numbers or strings")
        self._adopt(name, held)

    @classmethod
    def adopt(cls, name: str, array: Array | Unchecked) -> Parameter:
        """Make a parameter over ``array`` itself, not a copy: nobody may change it any more."""
        self = cls.__new__(cls)
        self._adopt(name, array)
        return self

    def _adopt(self, name: str, array: Array | Unchecked) -> None:
        global _stamp
        self.name = name
        shown = array.array if isinstance(array, Unchecked) else array
        self._type = TensorType(dtype_of(shown), shown.shape)
        with _publish:
            # A new parameter changes nothing that anyone runs with, yet its stamp is its own.
            _stamp += 1
            held = array if isinstance(array, Unchecked) else _read_only(array)
            self.published = State(_stamp, held)

    @property
    def type(self) -> TensorType:
        """Dtype and shape; they never change."""
        return self._type

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
        """Read-only view of the array; inside a transaction, of what that transaction assigned."""
        if _local.pinned is None and _local.staged is not None and self in _local.staged:
            return _read_only(_local.staged[self])
        return self.state.array

    @property
    def version(self) -> int:
        """Stamp of the last published change; a later change has a greater stamp."""
        return self.state.version

    def assign(self, array: npt.ArrayLike) -> None:
        """Replace the array by a copy of ``array``.

        Raises:
            ShapeError: dtype or shape differ from the parameter's, or it is no array.
        """
        try:
            new = np.array(array)
        except ValueError as error:  # lists of different lengths
            raise ShapeError(f"parameter {self.name!r} takes {self._type}: {error}") from error
        if (dtype_of(new), new.shape) != (self._type.dtype, self._type.shape):
            raise ShapeError(
                f"parameter {self.name!r} is {self._type}, got "
                f"{TensorType(dtype_of(new), new.shape)}; dtype and shape of a parameter are "
                "fixed: convert the array, or build the graph anew"
            )
        with transaction():
            _staged()[self] = new

    @contextmanager
    def update(self) -> Generator[Array]:
        """Give a writable copy of the array; publish it when the block ends without an error."""
        with transaction():
            new = np.array(self.array)
            yield new
            _staged()[self] = new

    def __repr__(self) -> str:
        return f"<Parameter {self.name!r} {self._type} version {self.version}>"


def _staged() -> dict[Parameter, Array]:
    staged = _local.staged
    assert staged is not None, "only called inside transaction()"
    return staged


@contextmanager
def transaction() -> Generator[None]:
    """Publish all changes made in the block at once; none if the block raises.

    Transactions of several threads take turns; one inside another joins it.
    """
    if _local.staged is not None:
        yield
        return
    with _writers:
        _local.staged = {}
        try:
            yield
            staged = _local.staged
        finally:
            _local.staged = None
        _commit(staged)


def _commit(staged: dict[Parameter, Array]) -> None:
    global _stamp, _epoch
    if not staged:
        return
    with _publish:
        for parameter, array in staged.items():
            _stamp += 1
            parameter.published = State(_stamp, _read_only(array))
        _epoch = _stamp
    _local.changes += 1


def changes_by_thread() -> int:
    """Return how often this thread has changed parameters."""
    return _local.changes


class Snapshot:
    """States of some parameters at one moment, between transactions."""

    __slots__ = ("epoch", "states")

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        """Collect the published states of ``parameters``."""
        with _publish:
            self.epoch = _epoch
            self.states = {p: p.published for p in parameters}


class pinned:
    """In the block and thread, parameters of the snapshot read as they were when it was taken."""

    __slots__ = ("_outer", "_snapshot")

    def __init__(self, snapshot: Snapshot | None) -> None:
        """Pin ``snapshot``; None unpins."""
        self._snapshot = snapshot

    def __enter__(self) -> None:
        self._outer = _local.pinned
        _local.pinned = self._snapshot

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _local.pinned = self._outer


def call_pinned(snapshot: Snapshot, function: Callable[[Any], Any], argument: Any) -> Any:
    """Return ``function(argument)`` as run under `pinned`, which costs a small model more."""
    outer = _local.pinned
    _local.pinned = snapshot
    try:
        return function(argument)
    finally:
        _local.pinned = outer


def pinned_snapshot() -> Snapshot | None:
    """Return the snapshot that this thread runs under, to hand it to a helper thread."""
    return _local.pinned


class Versions:
    """Versions of parameters on whose content something depends.

    Attributes:
        read: Each parameter with the version that was read.
    """

    def __init__(self, read: Iterable[tuple[Parameter, int]]) -> None:
        """Keep what was read."""
        self.read = tuple(read)
        self._asked_at = -1

    def hold(self) -> bool:
        """Return whether they are what this thread sees; each epoch looks at them once."""
        snapshot = _local.pinned
        stamp = _epoch if snapshot is None else snapshot.epoch
        if stamp != self._asked_at:
            if any(parameter.version != version for parameter, version in self.read):
                return False
            self._asked_at = stamp
        return True


class ParameterTable(dict[str, Parameter]):
    """Parameters by name; looking up another name is an error that lists the nearest."""

    def __missing__(self, name: object) -> Parameter:
        raise MissingInputError(f"there is no parameter {name!r}; {nearest(str(name), self)}")


def collect_parameters(
    values: Iterable[Any], nodes: Iterable[Any], graph: str
) -> dict[str, Parameter]:
    """Return the parameters of a graph by name.

    Args:
        values: The graph's values.
        nodes: Its nodes, whose bodies may use others.
        graph: Its name, for the error.

    Raises:
        ModelError: Two different parameters have the same name.
    """
    found: dict[str, Parameter] = ParameterTable()

    def add(parameter: Parameter) -> None:
        known = found.setdefault(parameter.name, parameter)
        if known is not parameter:
            raise ModelError(
                f"graph {graph!r} has two different parameters named {parameter.name!r}; rename one"
            )

    for value in values:
        if value.parameter is not None:
            add(value.parameter)
    for node in nodes:
        if node.attrs:
            for body in node.bodies:
                for parameter in body.parameters.values():
                    add(parameter)
    return found

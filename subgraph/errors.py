"""Every error that Subgraph raises on purpose; first file of the core, imported by all.

Each class is also a child of the builtin that fits, so that ``except ValueError`` keeps working.
A message says what went wrong, where, what was got, and what to do about it.
"""

from __future__ import annotations

import os
from typing import Any


class SubgraphError(Exception):
    """Base of all errors that Subgraph raises on purpose."""


class ModelError(SubgraphError, ValueError):
    """A model or graph is not well formed: a damaged file, a cycle, a name used twice."""


class ShapeError(ModelError):
    """A shape or dtype does not fit: of an input array, or between operators."""


class LimitError(SubgraphError, MemoryError, ValueError):
    """A budget is exceeded: of memory, of nodes, or of time; nothing of what it limits was done.

    The budgets are options: see `subgraph.graph.limits`.
    """


class UnsupportedOpError(SubgraphError, NotImplementedError):
    """An operator, or this version of it, is unknown or cannot run on the device asked."""


class ConfigError(SubgraphError, KeyError, ValueError):
    """A configuration key is unknown or its value is not allowed."""

    def __str__(self) -> str:
        # KeyError would print the repr of the message.
        return str(self.args[0]) if self.args else ""


class DeviceError(SubgraphError, RuntimeError):
    """A device is missing, could not start, or failed while it ran.

    Attributes:
        lost: Whether the device may be out of order; False where a user's own op failed, or an
            operator that was computed by its definition.
    """

    lost = True


class RequestError(DeviceError):
    """An inference request is in the wrong state for the call: busy, not started."""


class RequestCancelledError(RequestError):
    """The inference request was cancelled before it finished."""


class BlobError(SubgraphError, ValueError):
    """An exported model cannot be imported: damaged, foreign, or of another version."""


class FileError(ModelError, BlobError, OSError):
    """A model's file cannot be read or written: no permission, a folder in its place."""


class MissingFileError(FileError, FileNotFoundError):
    """A model's file, or the folder to write it to, does not exist."""


def file_error(action: str, path: str | os.PathLike[Any], error: OSError) -> FileError:
    """Return the error for a file that the system refuses to ``action`` ("read", "write")."""
    kind = MissingFileError if isinstance(error, FileNotFoundError) else FileError
    made = kind(f"cannot {action} {os.fspath(path)!r}: {error.strerror or error}; check the path")
    made.errno = error.errno
    return made


def require_type(
    value: object, kind: type | tuple[type, ...], error: type[SubgraphError], wanted: str
) -> None:
    """Refuse an argument of another type, which Python would only find later and elsewhere.

    Args:
        value: The argument.
        kind: What it has to be.
        error: What to raise.
        wanted: What to give, for the message: "a graph, as sg.load returns".

    Raises:
        SubgraphError: ``value`` is no ``kind``; an ``error``.
    """
    if not isinstance(value, kind):
        raise error(f"got {value!r} of type {type(value).__name__}; give {wanted}")


class PassError(SubgraphError, RuntimeError):
    """A pass broke its promise or is not registered."""


class PartitionError(PassError):
    """A selector or property misbehaved, or a partition breaks an invariant."""


class InternalError(SubgraphError, RuntimeError):
    """Subgraph itself is at fault: it failed on something that is valid. Please report it."""


class OutputIndexError(ModelError, IndexError):
    """A position is not that of an output."""


class MissingInputError(ModelError, KeyError):
    """An input that has no default was not given, or a name is no input, output or parameter."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""

"""Every error that Subgraph raises on purpose.

Most classes are also children of a builtin error, so that ``except ValueError`` works. A message
says what failed, on which value, and how to correct it.
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
    """A budget of memory, nodes or time is exceeded; raised before the work that it limits.

    The budgets are options: see `subgraph.graph.limits`.
    """


class UnsupportedOpError(SubgraphError, NotImplementedError):
    """An operator, or this version of it, is unknown or cannot run on the wanted device."""


class ConfigError(SubgraphError, KeyError, ValueError):
    """A configuration key is unknown or its value is not allowed."""

    def __str__(self) -> str:
        # KeyError would print the repr of the message.
        return str(self.args[0]) if self.args else ""


class DeviceError(SubgraphError, RuntimeError):
    """A device is missing, could not start, or failed while it ran.

    Attributes:
        lost: Whether the device may be unusable, so that regions move to their fallback; False if
            a user's op without device failed, or the reference of an operator.
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
    """Return the FileError for an OSError of a model's file.

    Args:
        action: What was tried, for the message: "read", "write".
        path: The file.
        error: The error of the system.
    """
    kind = MissingFileError if isinstance(error, FileNotFoundError) else FileError
    made = kind(f"cannot {action} {os.fspath(path)!r}: {error.strerror or error}; check the path")
    made.errno = error.errno
    return made


def message_of(error: BaseException) -> str:
    """Return the text of an exception, also of one whose ``__str__`` itself raises."""
    try:
        return str(error)
    except Exception as second:
        return f"(its text cannot be shown: {type(second).__name__})"


def described(error: BaseException) -> str:
    """Return the class and the text of a foreign exception, for the message of an error."""
    text = message_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def cause_of(error: BaseException) -> str:
    """Return what an error of the machine says; the class and the text of any other.

    The text of others, such as the key of a KeyError, says little without the class.
    """
    speaks = isinstance(error, (SubgraphError, ImportError, OSError, RuntimeError, MemoryError))
    return (speaks and message_of(error)) or described(error)


def require_type(
    value: object, kind: type | tuple[type, ...], error: type[SubgraphError], wanted: str
) -> None:
    """Raise an error for an argument of a wrong type, at the call that passes it.

    Args:
        value: The argument.
        kind: The allowed type, or types.
        error: Class of the error.
        wanted: A right argument, for the message: "a graph, as sg.load returns".

    Raises:
        SubgraphError: ``value`` is not of ``kind``; the class is ``error``.
    """
    if not isinstance(value, kind):
        raise error(f"got {value!r} of type {type(value).__name__}; give {wanted}")


class PassError(SubgraphError, RuntimeError):
    """A pass changed its input, returned an invalid graph, or is not registered."""


class PartitionError(PassError):
    """A selector or property breaks its contract, or a partition breaks an invariant."""


class InternalError(SubgraphError, RuntimeError):
    """Subgraph failed on valid input: a bug in Subgraph. Please report it."""


class OutputIndexError(ModelError, IndexError):
    """There is no output at a position."""


class MissingInputError(ModelError, KeyError):
    """An input without default is missing, or no input, output or parameter has a given name."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""

"""Compiled kernels on disk, in the user's cache folder: checked when read, written atomically.

Because an entry's code is run, files that users other than this one and root can write count as
absent, like damaged ones. Processes that write the same entry at the same time both succeed.
Without a writable folder every process compiles its kernels. `pruning` limits the folder's size.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import struct
from pathlib import Path
from typing import NamedTuple

from subgraph.system import pruning
from subgraph.system.environment import cache_folder as cache_folder
from subgraph.system.trusted_files import (
    UntrustedFileError,
    check_folder,
    distrust,
    make_folder,
    read_trusted,
    write_trusted,
)

_MAGIC = b"SGKERN01"
_PREFIX = struct.Struct("<8s32sI")  # magic, SHA-256 of the rest, length of the JSON header
_LOG = logging.getLogger("subgraph.engine")
_warned: set[tuple[str, str]] = set()


class ObjectCode(NamedTuple):
    """Compiled code of a function.

    Attributes:
        needs: Names of external symbols that the code refers to.
        data: A linked image, or an object file.
        start: Offset of the function in the image; None for an object file.
        features: Features of the instruction set on whose presence or absence the code depends.
    """

    needs: tuple[str, ...]
    data: bytes
    start: int | None = None
    features: tuple[tuple[str, bool], ...] = ()


def _path(key: str) -> Path:
    return cache_folder() / key[:2] / f"{key}.sgk"


def holds(key: str) -> bool:
    """Return whether there is a trusted entry of a key; it may be damaged."""
    path = _path(key)
    try:
        check_folder(cache_folder())
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and distrust(status, path) is None


def read(key: str) -> ObjectCode | None:
    """Return the entry of a key; None if there is none, or if it is damaged.

    Logs a warning, once, about a folder or an entry that other users can write.
    """
    path = _path(key)
    try:
        check_folder(cache_folder())
        raw = read_trusted(path)
    except UntrustedFileError as error:
        _warn_of_others(error)
        return None
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            _LOG.info("ignoring the cache entry %s: %s", path, error)
        return None
    try:
        magic, checksum, length = _PREFIX.unpack_from(raw)
        rest = raw[_PREFIX.size :]
        if magic != _MAGIC or hashlib.sha256(rest).digest() != checksum:
            raise ValueError("wrong header or checksum")
        header = json.loads(rest[:length])
        if header["key"] != key:
            raise ValueError("of another kernel")
        needs = tuple(str(name) for name in header["needs"])
        start = None if header.get("start") is None else int(header["start"])
        features = tuple((str(name), bool(on)) for name, on in header.get("features", ()))
    except (struct.error, ValueError, KeyError, TypeError) as error:
        _LOG.info("ignoring the cache entry %s: %s", path, error)
        return None
    pruning.record_use(path)
    return ObjectCode(needs, rest[length:], start, features)


def write(key: str, code: ObjectCode) -> bool:
    """Write an entry atomically; return whether that succeeded, and log a warning once if not."""
    about = {"key": key, "needs": code.needs, "start": code.start, "features": code.features}
    header = json.dumps(about).encode()
    rest = header + code.data
    raw = _PREFIX.pack(_MAGIC, hashlib.sha256(rest).digest(), len(header)) + rest
    folder = cache_folder()
    try:
        make_folder(folder)
        check_folder(folder)
        write_trusted(_path(key), raw)
        pruning.record_write(folder, len(raw))
    except UntrustedFileError as error:
        _warn_of_others(error)
        return False
    except OSError as error:
        _warn(error)
        return False
    return True


def _warn(error: OSError) -> None:
    _warn_once(
        "compiled kernels cannot be stored in %s (%s): every process compiles them again; set "
        "SUBGRAPH_CACHE_DIR to a folder that can be written",
        error,
    )


def _warn_of_others(error: UntrustedFileError) -> None:
    _warn_once(
        "compiled kernels in %s are not used, every process compiles them again: %s; or set "
        "SUBGRAPH_CACHE_DIR to a folder of your own",
        error.strerror or str(error),
    )


def _warn_once(text: str, why: object) -> None:
    """Log a warning with the folder and a reason, once per folder and text."""
    folder = str(cache_folder())
    if (folder, text) not in _warned:
        _warned.add((folder, text))
        _LOG.warning(text, folder, why)


def writable(*, warn: bool = True) -> bool:
    """Return whether entries can be written; if not, log a warning once if ``warn`` is set."""
    from tempfile import NamedTemporaryFile

    folder = cache_folder()
    try:
        make_folder(folder)
        check_folder(folder)
        with NamedTemporaryFile(dir=folder):
            return True
    except UntrustedFileError as error:
        _warn_of_others(error)
    except OSError as error:
        if warn:
            _warn(error)
    return False

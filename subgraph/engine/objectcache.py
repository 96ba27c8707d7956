"""Compiled kernels on disk, in the user's cache folder: read whole and checked, written atomically.

Damaged and foreign entries count as absent. Processes that write the same entry at once both
succeed; a folder that cannot be written only costs compiling again. `pruning` bounds its size.
"""

from __future__ import annotations

import hashlib
import json
import logging
import struct
from pathlib import Path

from subgraph.engine import pruning
from subgraph.engine.folders import cache_folder as cache_folder
from subgraph.engine.loader import ObjectCode

_MAGIC = b"SGKERN01"
_PREFIX = struct.Struct("<8s32sI")  # magic, SHA-256 of the rest, length of the JSON header
_LOG = logging.getLogger("subgraph.engine")
_warned: set[str] = set()


def _path(key: str) -> Path:
    return cache_folder() / key[:2] / f"{key}.sgk"


def holds(key: str) -> bool:
    """Return whether there is an entry of a key, whole or not."""
    return _path(key).is_file()


def read(key: str) -> ObjectCode | None:
    """Return the entry of a key; None when there is none that is whole and of that key."""
    path = _path(key)
    try:
        raw = path.read_bytes()
    except OSError:
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
    except (struct.error, ValueError, KeyError, TypeError) as error:
        _LOG.info("ignoring the cache entry %s: %s", path, error)
        return None
    pruning.used(path)
    return ObjectCode(needs, rest[length:], start)


def write(key: str, code: ObjectCode) -> bool:
    """Keep an entry, whole or not at all; return whether that worked, and warn once if not."""
    from tempfile import NamedTemporaryFile  # a warm process does without

    header = json.dumps({"key": key, "needs": code.needs, "start": code.start}).encode()
    rest = header + code.data
    raw = _PREFIX.pack(_MAGIC, hashlib.sha256(rest).digest(), len(header)) + rest
    path = _path(key)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
            temporary = Path(file.name)
            file.write(raw)
        temporary.replace(path)
        pruning.wrote(cache_folder(), len(raw))
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        _warn(error)
        return False
    return True


def _warn(error: OSError) -> None:
    folder = str(cache_folder())
    if folder not in _warned:
        _warned.add(folder)
        _LOG.warning(
            "compiled kernels cannot be kept in %s (%s): every process compiles them again; "
            "set SUBGRAPH_CACHE_DIR to a folder that can be written",
            folder,
            error,
        )


def writable(*, warn: bool = True) -> bool:
    """Return whether entries can be written; where not, ``warn`` once."""
    from tempfile import NamedTemporaryFile

    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=folder):
            return True
    except OSError as error:
        if warn:
            _warn(error)
        return False

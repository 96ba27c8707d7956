"""Files that come with the package: what is costly to make on every machine, made ahead.

``make kernels`` writes them into the folder ``prebuilt`` of the package, and a wheel carries them.
A file is a table in JSON and some bytes, hashes of all of it in front; nothing in it is unpickled
or executed to be read. Files are trusted as the package's own code is: only those that nobody but
this user and root can write are read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import zlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, cast

from subgraph.system.trusted_files import (
    UntrustedFileError,
    check_folder,
    open_trusted,
    write_trusted,
)

_MAGIC = b"SGPACK01"
_PREFIX = struct.Struct("<8s32sQ")  # magic, SHA-256 of the table, its length
_TABLE_LIMIT = 1 << 24  # bytes
UNPACKED_LIMIT = 1 << 26  # bytes of one entry, once it is unpacked
_LOG = logging.getLogger("subgraph.engine")
_warned: set[str] = set()


def folder() -> Path | None:
    """Return the folder of the files: ``SUBGRAPH_PREBUILT``, else the package's; None for none."""
    chosen = os.environ.get("SUBGRAPH_PREBUILT")
    if chosen is not None:
        return Path(chosen) if chosen.strip() else None
    return package_folder()


@cache
def package_folder() -> Path:
    """Return the folder of the files that come with the package."""
    spec = find_spec("subgraph")
    assert spec is not None, "this is a part of it"
    return Path((spec.submodule_search_locations or ["."])[0]) / "prebuilt"


def write_raw(path: Path, told: bytes, body: bytes) -> None:
    """Write a file of a table's text and some bytes."""
    prefix = _PREFIX.pack(_MAGIC, hashlib.sha256(told).digest(), len(told))
    write_trusted(path, prefix + told + body)


def read_table(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Return the table in front of a file and where it ends.

    Raises:
        ValueError: It is damaged.
        struct.error: It is shorter than that.
    """
    magic, checksum, length = _PREFIX.unpack(file.read(_PREFIX.size))
    if magic != _MAGIC or length > _TABLE_LIMIT:
        raise ValueError("it begins otherwise")
    text = file.read(length)
    if hashlib.sha256(text).digest() != checksum:
        raise ValueError("the checksum of its table does not fit")
    return cast(dict[str, Any], json.loads(text)), _PREFIX.size + length


def write_data(path: Path, key: str, data: bytes) -> None:
    """Write a file of some bytes that are used as a whole, and what they depend on."""
    packed = zlib.compress(data, 9)
    told = {"key": key, "checksum": hashlib.sha256(packed).hexdigest()}
    write_raw(path, json.dumps(told).encode(), packed)


def read_data(name: str, key: str) -> bytes | None:
    """Return what `write_data` wrote into the package's file of a name; None if it has another key.

    Warns once of a file that is damaged, or that others can write.
    """
    where = folder()
    if where is None:
        return None
    path = where / f"{name}.pack"
    try:
        check_folder(where)
        with open_trusted(path) as file:
            told, _ = read_table(file)
            packed = file.read()
        if told["key"] != key:
            return None
        if told["checksum"] != hashlib.sha256(packed).hexdigest():
            raise ValueError("the checksum of its content does not fit")
        return zlib.decompressobj().decompress(packed, UNPACKED_LIMIT)
    except FileNotFoundError:
        return None
    except (UntrustedFileError, struct.error, ValueError, LookupError, TypeError) as error:
        warn_once(f"{path} is not used: {error}; install the package anew")
        return None
    except (OSError, zlib.error) as error:
        _LOG.info("%s is not used: %s", path, error)
        return None


def warn_once(text: str) -> None:
    """Log a warning, each text once in a process."""
    if text not in _warned:
        _warned.add(text)
        _LOG.warning("%s", text)

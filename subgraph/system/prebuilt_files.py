"""Prebuilt files of the package: results that would be costly to compute on every machine.

``make kernels`` writes them into the folder ``prebuilt`` of the package, and a wheel contains them.
A file has a header with a checksum, a table in JSON and a body of bytes; reading unpickles and
executes nothing. Only files that nobody but this user and root can write are read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import struct
import zlib
from pathlib import Path
from typing import Any, BinaryIO, cast

from subgraph.system.environment import PREBUILT
from subgraph.system.trusted_files import (
    UntrustedFileError,
    check_folder,
    open_trusted,
    write_trusted,
)

_MAGIC = b"SGPACK01"
_PREFIX = struct.Struct("<8s32sQ")  # magic, SHA-256 of the table, its length
# Bytes of a table, and of one entry once it is unpacked, far more than builds make (estimates);
# larger ones count as damaged.
_TABLE_LIMIT = 1 << 24
UNPACKED_LIMIT = 1 << 26
_LOG = logging.getLogger("subgraph.engine")
_warned: set[str] = set()


def folder() -> Path | None:
    """Return the folder of the files: ``SUBGRAPH_PREBUILT`` ("": None), else the package's."""
    return PREBUILT.value()


def write_raw(path: Path, table: bytes, body: bytes) -> None:
    """Write a file.

    Args:
        path: Path of the file.
        table: The table, JSON in UTF-8.
        body: The bytes after the table.
    """
    prefix = _PREFIX.pack(_MAGIC, hashlib.sha256(table).digest(), len(table))
    write_trusted(path, prefix + table + body)


def read_table(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Return the table of a file, and the offset of the body.

    Raises:
        ValueError: the header or table is damaged.
        struct.error: the file is shorter than a header.
    """
    magic, checksum, length = _PREFIX.unpack(file.read(_PREFIX.size))
    if magic != _MAGIC or length > _TABLE_LIMIT:
        raise ValueError("it begins otherwise")
    text = file.read(length)
    if hashlib.sha256(text).digest() != checksum:
        raise ValueError("the checksum of its table does not fit")
    return cast("dict[str, Any]", json.loads(text)), _PREFIX.size + length


def write_data(path: Path, key: str, data: bytes) -> None:
    """Write a file for `read_data`.

    Args:
        path: Path of the file.
        key: A hash of everything that the data depends on.
        data: The data; it is compressed.
    """
    packed = zlib.compress(data, 9)
    table = {"key": key, "checksum": hashlib.sha256(packed).hexdigest()}
    write_raw(path, json.dumps(table).encode(), packed)


def read_data(name: str, key: str) -> bytes | None:
    """Return the data that `write_data` wrote; None if there is no valid file with this key.

    Logs a warning, once, about a file that is damaged or that other users can write.

    Args:
        name: Name of the file, without suffix, in `folder`.
        key: The key of `write_data`.
    """
    where = folder()
    if where is None:
        return None
    path = where / f"{name}.pack"
    try:
        check_folder(where)
        with open_trusted(path) as file:
            table, _ = read_table(file)
            packed = file.read()
        if table["key"] != key:
            return None
        if table["checksum"] != hashlib.sha256(packed).hexdigest():
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
    """Log a warning, once per text and process."""
    if text not in _warned:
        _warned.add(text)
        _LOG.warning("%s", text)

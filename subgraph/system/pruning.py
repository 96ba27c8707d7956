"""Limits the size of the folder of compiled kernels: the least recently used are removed first.

The modification time of an entry's file is the day of its last use. A process checks a folder when
it first writes to it, and then whenever it has written a sixteenth of the limit. Several processes
may prune at once: a removed entry is compiled again when needed, and loaded code is not affected.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from subgraph.system.environment import CACHE_MEGABYTES
from subgraph.system.forking import free_in_child

_LOG = logging.getLogger("subgraph.engine")
_DAY = 86400.0  # seconds
_FRESH = 60.0  # seconds; younger entries are not removed (estimate)
# Seconds; older temporary files belong to processes that died (estimate).
_ABANDONED = 3600.0
# Part of the limit that pruning leaves, so that the next writes need not prune (estimate).
_REMAINING = 0.75
_written: dict[Path, int] = {}
_lock = free_in_child(threading.Lock())


def limit() -> int:
    """Return the limit of a folder in bytes, from ``SUBGRAPH_CACHE_MB``; 0: no limit.

    Raises:
        ConfigError: the variable is not a number.
    """
    return int(CACHE_MEGABYTES.value() * 1e6)


def record_use(path: Path) -> None:
    """Record that an entry was read."""
    try:
        if time.time() - path.stat().st_mtime > _DAY:
            os.utime(path)
    except OSError:
        pass  # removed meanwhile, or in a folder that cannot be written


def record_write(folder: Path, nbytes: int) -> None:
    """Record that an entry was written, and remove old entries if the folder may be too large.

    Args:
        folder: Folder of compiled kernels, which has the entry.
        nbytes: Bytes of the entry.
    """
    limit_bytes = limit()
    with _lock:
        before = _written.get(folder)
        now = (before or 0) + nbytes
        due = before is None or now > limit_bytes / 16
        _written[folder] = 0 if due else now
    if due and limit_bytes:
        try:
            prune(folder, limit_bytes)
        except OSError as error:  # the entry is written nevertheless
            _LOG.info("no room was made in %s: %s", folder, error)


def prune(folder: Path, limit_bytes: int) -> int:
    """Remove the least recently used entries of a folder of more than ``limit_bytes`` bytes.

    Returns:
        Number of removed entries.
    """
    now = time.time()
    found = list(_files(folder))
    for used_at, _, path in found:
        if path.suffix == ".tmp" and now - used_at > _ABANDONED:
            _remove(path)
    entries = sorted(item for item in found if item[2].suffix == ".sgk")
    total = sum(size for _, size, _ in entries)
    if total <= limit_bytes:
        return 0
    removed = 0
    for used_at, size, path in entries:
        if total <= _REMAINING * limit_bytes or now - used_at < _FRESH:
            break
        total -= size
        removed += _remove(path)
    _LOG.info("removed %d compiled kernels that were not used for long from %s", removed, folder)
    return removed


def _files(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """Yield time of last use, size and path of each file."""
    for path in folder.glob("*/*"):
        try:
            about = path.stat()
        except OSError:
            continue  # another process has removed it
        yield about.st_mtime, about.st_size, path


def _remove(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True

"""Limits the size of the folder of compiled kernels: the least recently used are removed first.

The modification time of an entry's file is its last use, to the day. A folder is checked when this
process first writes to it, and then after every sixteenth of the limit. Several processes may do so
at once: a removed entry is compiled again when it is needed, and loaded code is not affected.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from subgraph.errors import ConfigError
from subgraph.system.forking import free_in_child

_LOG = logging.getLogger("subgraph.engine")
_DEFAULT_MB = 512
_DAY = 86400.0
_FRESH = 60.0  # seconds in which a new entry is not removed
_ABANDONED = 3600.0  # seconds after which a half-written file is removed
_REMAINING = 0.75  # part of the limit that remains, so that not every write has to remove entries
_written: dict[Path, int] = {}
_lock = free_in_child(threading.Lock())


def limit() -> int:
    """Return how many bytes a folder may hold: ``SUBGRAPH_CACHE_MB`` (512); 0 for no limit.

    Raises:
        ConfigError: The variable is not a number.
    """
    text = os.environ.get("SUBGRAPH_CACHE_MB", "").strip() or str(_DEFAULT_MB)
    try:
        return max(0, int(float(text) * 1e6))
    except (ValueError, OverflowError):
        raise ConfigError(f"SUBGRAPH_CACHE_MB={text!r} is no number of megabytes") from None


def used(path: Path) -> None:
    """Record that an entry was read."""
    try:
        if time.time() - path.stat().st_mtime > _DAY:
            os.utime(path)
    except OSError:
        pass  # removed meanwhile, or in a folder that cannot be written


def wrote(folder: Path, nbytes: int) -> None:
    """Record that an entry was written, and remove old entries if the folder may be too large.

    Args:
        folder: The folder.
        nbytes: Bytes of the entry.
    """
    most = limit()
    with _lock:
        before = _written.get(folder)
        now = (before or 0) + nbytes
        due = before is None or now > most / 16
        _written[folder] = 0 if due else now
    if due and most:
        try:
            prune(folder, most)
        except OSError as error:  # the entry is written nevertheless
            _LOG.info("no room was made in %s: %s", folder, error)


def prune(folder: Path, most: int) -> int:
    """Remove the least recently used entries of a folder with more than ``most`` bytes.

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
    if total <= most:
        return 0
    removed = 0
    for used_at, size, path in entries:
        if total <= _REMAINING * most or now - used_at < _FRESH:
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
            continue  # another process was faster
        yield about.st_mtime, about.st_size, path


def _remove(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True

"""Control groups (Linux, version 2) of this process: files with limits of memory and processors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def group_files(name: str, root: Path = Path("/")) -> Iterator[str]:
    """Yield the text of a file in each control group of this process and in its ancestors.

    Args:
        name: Name of the file: ``"cpu.max"``, ``"memory.max"``.
        root: Folder in which ``proc`` and ``sys`` are mounted.
    """
    groups = ["/"]
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        groups += [line.split(":", 2)[2] for line in lines if line.startswith("0::")]
    except (OSError, IndexError):
        pass
    base = root / "sys/fs/cgroup"
    for group in groups:
        folder = base / group.strip("/")
        for place in (folder, *folder.parents):
            if not place.is_relative_to(base):
                break
            try:
                yield (place / name).read_text()
            except OSError:
                continue

"""What control groups (Linux, version 2) say of this process: limits of memory and processors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def group_files(name: str, root: Path = Path("/")) -> Iterator[str]:
    """Yield what a file says in each control group of this process, and in those above them.

    Args:
        name: The file: ``"cpu.max"``, ``"memory.max"``.
        root: Where ``proc`` and ``sys`` are mounted.
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

"""Sizes of blocks and work-groups for a device: measured once on request, cached on disk.

The fastest sizes differ between devices and do not follow from the properties that devices report.
The option TUNE of OPENCL measures candidates by a matrix product. The result is stored in the
user's cache folder by device and driver, and used from then on, with or without the option.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import attrs

from subgraph.opencl.runtime import Runtime
from subgraph.system.environment import base_folder
from subgraph.system.trusted_files import read_trusted, write_trusted

TILES = (128, 64, 32)


def _positive(instance: object, attribute: attrs.Attribute[int], value: Any) -> None:
    if not isinstance(value, int) or not 1 <= value <= 4096:
        raise ValueError(f"{attribute.name} = {value!r} is no size")


@attrs.frozen
class ClTuning:
    """Sizes with which the kernels of matrix products are built; each of a CPU is from 1 to 4096.

    Attributes:
        rows: Rows of a register tile, on a CPU.
        blocks: Register tiles that a work-item computes, one below the other, on a CPU.
        chunk: Depth of the part of a product whose operands stay in the first-level cache, on a
            CPU, in elements.
        tile: Rows and columns of the largest tile in local memory, on a GPU; products of few tiles
            take smaller ones.
    """

    rows: int = attrs.field(default=6, validator=_positive)
    blocks: int = attrs.field(default=8, validator=_positive)
    chunk: int = attrs.field(default=256, validator=_positive)
    tile: int = attrs.field(default=TILES[0], validator=attrs.validators.in_(TILES))


def candidates(runtime: Runtime) -> Iterator[ClTuning]:
    """Yield the tunings that are measured on a device."""
    if runtime.traits.is_gpu:
        yield from (ClTuning(tile=tile) for tile in TILES)
        return
    for rows in (4, 6, 8):
        for blocks, chunk in ((8, 256), (8, 512), (4, 1024)):
            yield ClTuning(rows=rows, blocks=blocks, chunk=chunk)


def _file(runtime: Runtime) -> Path:
    device = runtime.device
    # Another driver compiles other code, so that its fastest sizes may differ.
    identity = (device.platform.name, device.name, device.version, device.driver_version)
    digest = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:24]
    return base_folder() / "opencl" / f"{digest}.json"


@cache
def stored(runtime: Runtime) -> ClTuning | None:
    """Return the cached tuning of a device; None if there is none, or if its file is damaged."""
    try:
        values: dict[str, int] = json.loads(read_trusted(_file(runtime)))
        return ClTuning(**values)
    except (OSError, ValueError, TypeError):
        return None


def tuned(runtime: Runtime, measure: Callable[[ClTuning], float]) -> ClTuning:
    """Return the cached tuning of a device; if there is none, measure, cache and return the best.

    Args:
        runtime: The device.
        measure: Returns the seconds that a matrix product takes with a tuning.
    """
    best = stored(runtime)
    if best is not None:
        return best
    best = min(candidates(runtime), key=measure)
    _store(_file(runtime), best)
    # `stored` has cached that there is no file.
    stored.cache_clear()
    return best


def _store(path: Path, choice: ClTuning) -> None:
    """Write a file atomically; if the folder cannot be written, the next process measures again."""
    with suppress(OSError):
        write_trusted(path, json.dumps(attrs.asdict(choice)).encode())

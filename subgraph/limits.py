"""How large a single value may be: what no machine can hold is refused before it is allocated."""

from __future__ import annotations

import math
import os
from functools import cache

from subgraph.control_groups import group_files
from subgraph.types import TensorType, numpy_dtype


@cache
def machine_memory() -> int:
    """Return how many bytes this process may have: of the machine, its control groups, its own."""
    try:
        import resource

        limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
        allowed = resource.getrlimit(resource.RLIMIT_AS)[0]
    except (ImportError, OSError, ValueError):
        return 1 << 36
    if allowed > 0:
        limits.append(allowed)
    limits += [int(said) for said in map(str.strip, group_files("memory.max")) if said.isdigit()]
    return min(limits)


def memory_limit() -> int:
    """Return how many bytes one value may have: half of all, for it is made from others."""
    return machine_memory() // 2


def size_in_bytes(type_: TensorType) -> int:
    """Return the bytes of a value of this type; dimensions that are not numbers count as one."""
    dims = [dim for dim in type_.shape or () if isinstance(dim, int)]
    return math.prod(dims) * numpy_dtype(type_.dtype).itemsize

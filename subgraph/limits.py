"""How large a single value may be: what no machine can hold is refused before it is allocated."""

from __future__ import annotations

import math
import os
from functools import cache

from subgraph.types import TensorType, numpy_dtype


@cache
def memory_limit() -> int:
    """Return how many bytes one value may have: what the machine has, or the process may use."""
    try:
        import resource

        limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        allowed = resource.getrlimit(resource.RLIMIT_AS)[0]
    except (ImportError, OSError, ValueError):
        return 1 << 36
    return min(limit, allowed) if allowed > 0 else limit


def size_in_bytes(type_: TensorType) -> int:
    """Return the bytes of a value of this type; dimensions that are not numbers count as one."""
    dims = [dim for dim in type_.shape or () if isinstance(dim, int)]
    return math.prod(dims) * numpy_dtype(type_.dtype).itemsize

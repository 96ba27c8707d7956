"""Where compiled code is kept between processes."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder of compiled kernels: ``SUBGRAPH_CACHE_DIR``, else the user's cache."""
    chosen = os.environ.get("SUBGRAPH_CACHE_DIR")
    return (Path(chosen) if chosen else _user_cache()) / "kernels"


@cache
def _user_cache() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("subgraph", appauthor=False)

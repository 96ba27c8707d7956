"""Where compiled code, and what else is kept between processes, lies."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path


def base_folder() -> Path:
    """Return the folder of what is kept: ``SUBGRAPH_CACHE_DIR``, else the user's cache."""
    chosen = os.environ.get("SUBGRAPH_CACHE_DIR")
    return Path(chosen) if chosen else user_folder()


def cache_folder() -> Path:
    """Return the folder of compiled kernels."""
    return base_folder() / "kernels"


@cache
def user_folder() -> Path:
    """Return the folder for Subgraph in the user's cache."""
    from platformdirs import user_cache_path

    return user_cache_path("subgraph", appauthor=False)

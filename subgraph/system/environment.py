"""Folders of compiled code and of other files that processes share."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path


def base_folder() -> Path:
    """Return the folder of cached files: ``SUBGRAPH_CACHE_DIR``, else `user_folder`."""
    chosen = os.environ.get("SUBGRAPH_CACHE_DIR")
    return Path(chosen) if chosen else user_folder()


def cache_folder() -> Path:
    """Return the folder of compiled kernels."""
    return base_folder() / "kernels"


@cache
def user_folder() -> Path:
    """Return Subgraph's folder in the user's cache folder."""
    from platformdirs import user_cache_path

    return user_cache_path("subgraph", appauthor=False)

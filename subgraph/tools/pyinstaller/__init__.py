"""What PyInstaller must know to collect Subgraph into an application.

PyInstaller finds this folder by the entry point ``pyinstaller40`` and runs ``hook-subgraph.py`` for
an application that imports Subgraph.
"""

from __future__ import annotations

from pathlib import Path


def hook_folders() -> list[str]:
    """Return the folders with hooks for PyInstaller."""
    return [str(Path(__file__).parent)]

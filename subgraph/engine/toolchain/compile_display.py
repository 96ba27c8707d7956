"""Shows the progress of compilation, in counts, in one line of a terminal or a notebook.

Nothing is written to other streams; the log has one line when compilation begins.
"""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from typing import Any

from subgraph.system.forking import free_in_child

_lock = free_in_child(threading.Lock())
_shown = 0  # width of the line that is shown


def show(done: int, total: int, doing: str) -> None:
    """Show how many kernels are compiled; the line replaces the one before.

    Args:
        done: Number of compiled kernels.
        total: Number of kernels to compile.
        doing: Name of the kernel that is being compiled.
    """
    if _is_watched():
        _write(f"compiling kernels for this machine, once: {done}/{total} ({doing})")


def end() -> None:
    """Remove the line."""
    if _shown:
        _write("")


def _is_watched() -> bool:
    """Return whether the standard error is a terminal or a notebook."""
    stream: Any = sys.stderr
    try:
        return bool(stream.isatty()) or _in_notebook()
    except (AttributeError, ValueError):  # no stream, or closed
        return False


def _in_notebook() -> bool:
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


def _write(text: str) -> None:
    global _shown
    with _lock, suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(f"\r{text.ljust(_shown)}" + ("" if text else "\r"))
        sys.stderr.flush()
        _shown = len(text)

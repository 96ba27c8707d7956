"""Progress of compilation in counts, on the standard error: in a terminal or a notebook, one line.

Nothing is written elsewhere: a log gets a line where compilation begins.
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
    """Show how many kernels are compiled, in place of what was shown before.

    Args:
        done: How many are.
        total: How many are to be.
        doing: What is at work.
    """
    if _is_watched():
        _write(f"compiling kernels for this machine, once: {done}/{total} ({doing})")


def end() -> None:
    """Take the line away."""
    if _shown:
        _write("")


def _is_watched() -> bool:
    """Return whether somebody sees lines that are written over each other."""
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

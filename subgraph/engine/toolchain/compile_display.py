"""Progress of compilation: one line, rewritten in place, on a terminal or in a notebook.

Nothing is written if the standard error is neither; the log then has one line per batch.
"""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from typing import Any

from subgraph.system.forking import free_in_child

_lock = free_in_child(threading.Lock())
_shown = 0  # characters of the line on the screen


def show(done: int, total: int, doing: str) -> None:
    """Show how many kernels are compiled, in place of the previous line.

    Args:
        done: Number of kernels that this process has compiled.
        total: Number of kernels that it has compiled or knows that it must compile.
        doing: Factory name of the kernel whose compilation begins or ended.
    """
    if _is_interactive():
        _write(f"compiling kernels for this machine, once: {done}/{total} ({doing})")


def clear() -> None:
    """Remove the line."""
    if _shown:
        _write("")


def _is_interactive() -> bool:
    """Return whether a person can see the standard error: a terminal or a notebook cell."""
    stream: Any = sys.stderr
    try:
        return bool(stream.isatty()) or _in_notebook()
    except (AttributeError, ValueError):  # no stream, or closed
        return False


def _in_notebook() -> bool:
    """Return whether IPython runs as a Jupyter kernel, whose shell has this class name."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


def _write(text: str) -> None:
    global _shown
    with _lock, suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(f"\r{text.ljust(_shown)}" + ("" if text else "\r"))
        sys.stderr.flush()
        _shown = len(text)

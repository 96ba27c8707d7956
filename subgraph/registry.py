"""Registries: one name, one owner; the files of a folder are found, sorted, and loaded on demand.

Ops, passes, selectors, properties and devices each have one. Nothing depends on import order.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from subgraph.errors import SubgraphError

T = TypeVar("T")
# One for all registries: the files of one look into others, in any order.
_discovery = threading.RLock()


class Registry(Generic[T]):
    """Names to owners of one kind ("pass", "device", ...); looked up names say what is near."""

    def __init__(
        self,
        kind: str,
        error: type[SubgraphError],
        discover: Callable[[], None] | None = None,
    ) -> None:
        """Make an empty registry; ``discover`` runs once, before the first look-up."""
        self.kind = kind
        self._error = error
        self._discover = discover
        self._discovering = False
        self._entries: dict[str, tuple[T, str]] = {}
        self._lock = threading.RLock()

    def register(self, name: str, value: T, owner: str, *, replace: bool = False) -> None:
        """Give ``name`` to ``value``; ``owner`` says where it is defined.

        Raises:
            SubgraphError: another owner has the name; the message names both.
        """
        with self._lock:
            known = self._entries.get(name)
            if known is not None and known[1] != owner and not replace:
                raise self._error(
                    f"{self.kind} {name!r} has two owners: {known[1]} and {owner}; rename one"
                )
            self._entries[name] = (value, owner)

    def unregister(self, name: str) -> None:
        """Forget ``name`` if it is there."""
        with self._lock:
            self._entries.pop(name, None)

    def get(self, name: str) -> T:
        """Return what is registered as ``name``.

        Raises:
            SubgraphError: nothing is; the message lists the nearest names.
        """
        found = self.find(name)
        if found is None:
            raise self._error(f"no {self.kind} named {name!r}; {nearest(name, self.names())}")
        return found

    def find(self, name: str) -> T | None:
        """Return what is registered as ``name``, or None."""
        self._load()
        entry = self._entries.get(name)
        return None if entry is None else entry[0]

    def names(self) -> list[str]:
        """Return all names, sorted."""
        self._load()
        return sorted(self._entries)

    def items(self) -> Iterator[tuple[str, T]]:
        """Yield names and values, sorted by name."""
        for name in self.names():
            yield name, self._entries[name][0]

    def __contains__(self, name: object) -> bool:
        self._load()
        return name in self._entries

    def _load(self) -> None:
        if self._discover is None:
            return
        with _discovery:
            if self._discover is None or self._discovering:
                return  # another thread was first, or the files being loaded look into themselves
            self._discovering = True
            try:
                self._discover()
                self._discover = None
            finally:
                self._discovering = False


def load_files(package: str, keep: Callable[[str], bool]) -> None:
    """Import the modules of ``package`` whose name ``keep`` accepts, sorted by name."""
    folder = importlib.import_module(package).__path__
    for name in sorted(info.name for info in pkgutil.iter_modules(folder)):
        if keep(name):
            importlib.import_module(f"{package}.{name}")


def defined_at(thing: object) -> str:
    """Return file and qualified name of a class or function, as the owner of its name.

    The file, not the module, tells owners apart: one file may be imported and run as a script.
    """
    name = getattr(thing, "__qualname__", type(thing).__qualname__)
    members = [thing, *vars(thing).values()] if isinstance(thing, type) else [thing]
    for member in members:
        code = getattr(member, "__code__", None)
        if code is not None:
            return f"{code.co_filename}:{name}"
    module = getattr(thing, "__module__", type(thing).__module__)
    file = getattr(sys.modules.get(module), "__file__", None)
    return f"{file or module}:{name}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a phrase that says which known names are near ``name``, for error messages."""
    names = sorted(known) if isinstance(known, (set, frozenset)) else list(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if not close:
        folded = {n.lower(): n for n in names}
        close = [folded[m] for m in difflib.get_close_matches(name.lower(), folded, n=3)]
    if close:
        return f"did you mean {' or '.join(repr(n) for n in close)}?"
    if not names:
        return "none is registered"
    shown = ", ".join(names[:12])
    return f"known: {shown}{', …' if len(names) > 12 else ''}"

"""Registries of operators, passes, selectors, properties and devices, filled on demand.

A name has one owner. A registry may find the files of a folder that register names; the result does
not depend on import order. Looking up a name imports the files that contain it as a literal, and
all others only if these do not register it, so that a process imports only the files that its
models need.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.machinery import FileFinder
from pathlib import Path
from typing import Generic, TypeVar

from subgraph.errors import SubgraphError, require_type
from subgraph.system.forking import computed_once, free_in_child, held_while_forking

T = TypeVar("T")
_FUNCTION = b"\n@function("
_STANDARD = b'domain=""'
_CONTINUED = b" \t\r\n)]}"  # first bytes of lines that continue a statement
_DEFINITION = (b"def ", b"async def ")
# One lock for all registries: importing the files of one may look up names in others.
_discovery = held_while_forking(threading.RLock())


class Files:
    """The modules of a package and its subpackages that register names; imported when needed."""

    def __init__(
        self,
        package: str,
        keep: Callable[[str], bool],
        home_of: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        """Choose modules; nothing is imported.

        Args:
            package: Full name of the package.
            keep: Whether a module, given by its full name, registers names.
            home_of: Returns the subpackage in which alone a name is registered; None if it is not
                known.
        """
        self._package = package
        self._keep = keep
        self._home_of = home_of
        self._texts: dict[str, bytes] = {}

    @computed_once
    def _waiting(self) -> dict[str, pkgutil.ModuleInfo]:
        """The modules not yet imported, by their full names."""
        return {name: info for name, info in _modules_of(self._package) if self._keep(name)}

    def load_all(self) -> None:
        """Import all modules, sorted by name."""
        self._import(sorted(self._waiting))

    def load_naming(self, name: str) -> None:
        """Import the modules that may register a name, see `naming`."""
        self._import(self.naming(name))

    def naming(self, name: str) -> list[str]:
        """Return the modules not yet imported that contain a name, without its domain, in quotes.

        A name inside of a function does not count, which may only compare with it. Of the modules
        with ``@function``, which define operators of other domains by those of the standard, only
        those that state the standard's domain count for a name without a domain. If the home of a
        name is known, only its modules count, and all of them if none contains the name.
        """
        domain, _, op_type = name.rpartition("::")
        home = self._home_of(name)
        modules = sorted(self._waiting)
        if home is not None:
            modules = [module for module in modules if module.startswith(f"{home}.")]
        found = [module for module in modules if _registers(self._text(module), op_type, domain)]
        return found or ([] if home is None else modules)

    def package_of(self, owner: str) -> str | None:
        """Return the package of the modules that contains a place; None if it is elsewhere.

        Args:
            owner: The place, "FILE:...".
        """
        folder = str(Path(owner.rpartition(":")[0]).parent)
        for name, info in _modules_of(self._package):
            if getattr(info.module_finder, "path", None) == folder:
                return name.rpartition(".")[0]
        return None

    def _text(self, module: str) -> bytes:
        text = self._texts.get(module)
        if text is None:
            text = self._texts[module] = _source(self._waiting[module])
        return text

    def _import(self, modules: Iterable[str]) -> None:
        for module in modules:
            importlib.import_module(module)
            self._waiting.pop(module, None)
            self._texts.pop(module, None)


def _registers(text: bytes, op_type: str, domain: str) -> bool:
    """Return whether a source may register a name, see `Files.naming`; "" if there is no source."""
    if not text:
        return True
    if not domain and _FUNCTION in text and _STANDARD not in text:
        return False
    literal = f'"{op_type}"'.encode()
    position = text.find(literal)
    while position >= 0:
        # The statement that contains the literal begins with the last line that is not indented,
        # and does not close a bracket.
        begin = text.rfind(b"\n", 0, position)
        while begin >= 0 and text[begin + 1] in _CONTINUED:
            begin = text.rfind(b"\n", 0, begin)
        if not text.startswith(_DEFINITION, begin + 1):
            return True
        position = text.find(literal, position + 1)
    return False


@cache
def _modules_of(package: str) -> list[tuple[str, pkgutil.ModuleInfo]]:
    """Return the full names of the modules of a package and its subpackages, and what they are."""
    return _modules_in(package, importlib.import_module(package).__path__)


def _modules_in(package: str, folders: Iterable[str]) -> list[tuple[str, pkgutil.ModuleInfo]]:
    """Return what `_modules_of` does; subpackages that are plain folders are not imported."""
    found: list[tuple[str, pkgutil.ModuleInfo]] = []
    for info in pkgutil.iter_modules(folders):
        name = f"{package}.{info.name}"
        if not info.ispkg:
            found.append((name, info))
        elif isinstance(info.module_finder, FileFinder):
            found += _modules_in(name, [str(Path(info.module_finder.path, info.name))])
        else:
            found += _modules_of(name)
    return found


def _source(info: pkgutil.ModuleInfo) -> bytes:
    """Return the source of a module; b"" if it is installed without source."""
    try:
        return Path(getattr(info.module_finder, "path", ""), f"{info.name}.py").read_bytes()
    except OSError:
        return b""


class Registry(Generic[T]):
    """A table of names of one kind ("pass", "device", ...) with their values and owners.

    Attributes:
        kind: The kind, for messages.
    """

    def __init__(
        self,
        kind: str,
        error: type[SubgraphError],
        discover: Callable[[], None] | Files | None = None,
    ) -> None:
        """Make an empty registry.

        Args:
            kind: The kind of the entries, for messages.
            error: Class of the errors that it raises.
            discover: The files that register names; or a function that registers all, called once,
                before the first look-up. None: nothing is discovered.
        """
        self.kind = kind
        self._error = error
        self._files = discover if isinstance(discover, Files) else None
        self._discover = discover.load_all if isinstance(discover, Files) else discover
        self._sought: set[str] = set()
        self._named: set[str] = set()
        self._discovering = False
        self._entries: dict[str, tuple[T, str]] = {}
        self._lock = free_in_child(threading.RLock())

    def register(self, name: str, value: T, owner: str) -> None:
        """Register a value under a name.

        Args:
            name: The name.
            value: The value.
            owner: Place of its definition (see `defined_at`). The same owner may register a name
                again, as when a module is reloaded.

        Raises:
            SubgraphError: another owner has the name; the message names both. Or it is no string.
        """
        require_type(name, str, self._error, f"the name of the {self.kind}, a string")
        with self._lock:
            known = self._entries.get(name)
            if known is not None and known[1] != owner:
                raise self._error(
                    f"{self.kind} {name!r} has two owners: {known[1]} and {owner}; rename one"
                )
            self._entries[name] = (value, owner)

    def unregister(self, name: str) -> None:
        """Remove ``name`` if it is registered."""
        with self._lock:
            self._entries.pop(name, None)

    def get(self, name: str) -> T:
        """Return the value of ``name``.

        Raises:
            SubgraphError: ``name`` is not registered; the message lists the nearest names.
        """
        found = self.find(name)
        if found is None:
            raise self._error(f"no {self.kind} named {name!r}; {nearest(name, self.names())}")
        return found

    def find(self, name: str, *, named_only: bool = False) -> T | None:
        """Return the value of ``name``, or None.

        Args:
            name: The name.
            named_only: Whether to import only the files that contain ``name`` as a literal; for
                registries in which most names that are looked up are not registered.
        """
        # Also for a registered name, which may have a second owner in a file not yet imported.
        sought = self._named if named_only else self._sought
        if self._discover is not None and name not in sought:
            self._load(name, named_only=named_only)
        entry = self._entries.get(name)
        return None if entry is None else entry[0]

    def owner(self, name: str) -> str:
        """Return the place of the definition of a name that was found (see `defined_at`)."""
        return self._entries[name][1]

    def names(self) -> list[str]:
        """Return all names, sorted."""
        self._load()
        return sorted(self._entries)

    def items(self) -> Iterator[tuple[str, T]]:
        """Yield names and values, sorted by name."""
        for name in self.names():
            yield name, self._entries[name][0]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.find(name) is not None

    def _load(self, name: str | None = None, *, named_only: bool = False) -> None:
        """Import the files that may register ``name``; None: all files.

        With ``named_only`` these are the files that contain it as a literal.
        """
        if self._discover is None:
            return
        with _discovery:
            if self._discover is None or self._discovering:
                return  # another thread has loaded them, or a file being imported looks up a name
            self._discovering = True
            try:
                if self._files is not None and name is not None:
                    self._files.load_naming(name)
                if named_only and name is not None:
                    self._named.add(name)
                elif name is None or self._files is None or name not in self._entries:
                    self._discover()
                    self._discover = None
                else:
                    self._sought.add(name)
            finally:
                self._discovering = False


def declared_at() -> str:
    """Return the file and line that called the function which calls this one, "FILE:LINE"."""
    caller = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]  # no other way is as fast
    return f"{caller.f_code.co_filename}:{caller.f_lineno}"


def defined_at(thing: object) -> str:
    """Return file and qualified name of a class, function or object's class, as an owner's name.

    It has the file, not the module, because a file may be both imported and run as a script.
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
    """Return a phrase for error messages with the known names that are similar to ``name``.

    Args:
        name: A name that is not known.
        known: The known names; in the order of a list, or sorted if it is a set.
    """
    name = str(name)  # users may pass other objects as a name
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

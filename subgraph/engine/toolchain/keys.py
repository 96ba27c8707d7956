"""Cache keys: a hash of everything that determines a kernel's object code.

It covers the kernel's variant, the source of its module and of all modules that this imports from
the same package or from Subgraph, the source of our compiler, the versions of numba, llvmlite and
Python, and the instruction set. Sources are read, never imported: a process whose kernels are all
cached imports neither the kernel modules nor numba.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

from subgraph.engine.toolchain.kernel import Kernel
from subgraph.engine.toolchain.loader import KernelError
from subgraph.system import host

# To be raised when the calling convention of kernels changes, which makes cached code unusable.
ABI_VERSION = 1
# An import statement: the module and the names of ``from module import names``, or the modules of
# ``import modules``.
_IMPORT = re.compile(
    r"[ \t]*(?:from[ \t]+(\.?[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n#]+)"
    r"|import[ \t]+([\w., \t]+))"
)


def symbol_of(key: str) -> str:
    """Return the symbol of the function that is stored under a key of hexadecimal digits."""
    return f"sg_{key[:32]}"


def cache_key(kernel: Kernel, isa: host.Isa) -> str:
    """Return the cache key of a kernel's object code for an instruction set, as hex digits.

    Raises:
        KernelError: The kernel's module does not exist, or has no source file.
    """
    text = "\0".join((kernel.description, source_digest(kernel.module), environment(isa)))
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def environment(isa: host.Isa) -> str:
    """Return the parts of a key that all kernels share: compiler, versions and instruction set."""
    parts = (
        *compiler_versions().values(),
        f"{sys.version_info[0]}.{sys.version_info[1]}",
        sys.platform,
        host.architecture(),
        isa.name,
        isa.cpu,
        isa.features,
        isa.like,
    )
    return "\0".join(parts)


@cache
def compiler_versions() -> dict[str, str]:
    """Return the versions, or hashes of sources, of the parts that compile kernels, by name.

    They are the same on every machine with the same packages. Numba's is the hash of its version
    file, because importing numba to ask for its version takes long.
    """
    import llvmlite

    spec = find_spec("numba")
    numba = "missing"
    if spec is not None and spec.origin is not None:
        version = Path(spec.origin).with_name("_version.py")
        if version.is_file():
            numba = hashlib.sha256(version.read_bytes()).hexdigest()
        else:
            from importlib.metadata import version as distribution_version

            numba = distribution_version("numba")
    return {
        "abi": str(ABI_VERSION),
        "compiler": source_digest("subgraph.engine.toolchain.compiler"),
        "numba": numba,
        "llvmlite": str(llvmlite.__version__),
    }


@cache
def source_digest(module: str) -> str:
    """Return the hash of a module's source and, transitively, of the modules that it imports.

    Only modules of its own top-level package and of Subgraph count.

    Raises:
        KernelError: There is no such module, or it has no source file.
    """
    root = module.partition(".")[0]
    seen: dict[str, bytes] = {}
    pending = [module]
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        found = _module(name, root)
        if found is not None:
            seen[name], imported = found
            pending.extend(imported)
        elif name == module:
            raise KernelError(f"kernel module {module!r} has no source file")
    joined = hashlib.sha256()
    for name in sorted(seen):
        joined.update(name.encode() + b"\0" + seen[name])
    return joined.hexdigest()


@cache
def _module(name: str, root: str) -> tuple[bytes, list[str]] | None:
    """Return the hash of a module's source, and the modules that it imports; None without source.

    Args:
        name: The module.
        root: As for `_imported`.
    """
    source, is_package = _source(name)
    if source is None:
        return None
    package = name if is_package else name.rpartition(".")[0]
    imported = _imported(source.decode(), package, root)
    return hashlib.sha256(source).digest(), imported


@cache
def _spec(module: str) -> ModuleSpec | None:
    """Find a module; only the packages that contain it are imported. None if there is none."""
    parent = module.rpartition(".")[0]
    if parent:
        above = _spec(parent)
        if above is None or above.submodule_search_locations is None:
            return None  # its parent is a module, not a package: this is a name inside a module
    try:
        return find_spec(module)
    except (ImportError, AttributeError, ValueError):
        return None


def _source(module: str) -> tuple[bytes | None, bool]:
    """Return a module's source, None if it has no Python file, and whether it is a package."""
    spec = _spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None, False
    return Path(spec.origin).read_bytes(), spec.submodule_search_locations is not None


def _imported(source: str, package: str, root: str) -> list[str]:
    """Return the modules that a source text may import from ``root`` or from Subgraph.

    Names imported from a module are listed as if they were modules; `_source` finds none for them.

    Args:
        source: The text of a module.
        package: Full name of the package that the module is in, for relative imports.
        root: Name of the module's top-level package.
    """
    found: list[str] = []
    for match in _import_statements(source):
        origin, names, plain = match.groups()
        if plain is not None:
            found += [name.split()[0] for name in plain.split(",") if name.strip()]
            continue
        if origin.startswith("."):
            origin = f"{package}.{origin[1:]}".rstrip(".")
        found.append(origin)
        found += [f"{origin}.{name}" for name in re.findall(r"\w+", names)]
    return [name for name in found if name.startswith((f"{root}.", "subgraph."))]


def _import_statements(source: str) -> Iterator[re.Match[str]]:
    """Yield the matches of `_IMPORT` in a source text."""
    # Searching the word first takes a tenth of the time of matching the expression at every line.
    at = source.find("import")
    while at >= 0:
        match = _IMPORT.match(source, source.rfind("\n", 0, at) + 1)
        if match is not None:
            yield match
        at = source.find("import", at + 1 if match is None else max(match.end(), at + 1))

"""The name of a kernel's object code in the cache: a hash of everything that shapes it.

That is the source of the kernel's module and of all modules of the package which it imports, its
variant, our compiler's source, the versions of numba, llvmlite and Python, and the host. Nothing is
imported to find out.
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

# Raise it when kernels of before can no longer be called.
ABI_VERSION = 1
_IMPORT = re.compile(
    r"[ \t]*(?:from[ \t]+(\.?[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n#]+)"
    r"|import[ \t]+([\w., \t]+))"
)


def text_key(text: str, isa: host.Isa) -> str:
    """Return the key of code that is made from a text alone."""
    return hashlib.sha256(f"{text}\0{environment(isa)}".encode()).hexdigest()


def cache_key(kernel: Kernel, isa: host.Isa) -> str:
    """Return the content hash that names a kernel's entry in the cache.

    Raises:
        KernelError: The kernel's module has no source.
    """
    text = "\0".join((kernel.description, source_digest(kernel.module), environment(isa)))
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def environment(isa: host.Isa) -> str:
    """Return everything but a kernel's own sources that shapes the object code."""
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
    """Return what makes code out of kernels: versions and hashes, the same on every machine."""
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
    """Return the hash of a module's source and of all modules of this package it imports.

    Raises:
        KernelError: There is no such module, or it has no source file.
    """
    seen: dict[str, bytes] = {}
    pending = [module]
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        source, is_package = _source(name)
        if source is None:
            if name == module:
                raise KernelError(f"kernel module {module!r} has no source file")
            continue
        seen[name] = hashlib.sha256(source).digest()
        package = name if is_package else name.rpartition(".")[0]
        pending.extend(_imported(source.decode(), package, module.partition(".")[0]))
    joined = hashlib.sha256()
    for name in sorted(seen):
        joined.update(name.encode() + b"\0" + seen[name])
    return joined.hexdigest()


@cache
def _spec(module: str) -> ModuleSpec | None:
    """Find a module without importing it: only the packages above it are imported."""
    parent = module.rpartition(".")[0]
    if parent:
        above = _spec(parent)
        if above is None or above.submodule_search_locations is None:
            return None  # a name inside a module
    try:
        return find_spec(module)
    except (ImportError, AttributeError, ValueError):
        return None


@cache
def _source(module: str) -> tuple[bytes | None, bool]:
    """Return a module's source (None when there is none) and whether it is a package."""
    spec = _spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None, False
    return Path(spec.origin).read_bytes(), spec.submodule_search_locations is not None


def _imported(source: str, package: str, root: str) -> list[str]:
    """List the modules under ``root`` that a source text imports, with more than it needs."""
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
    at = source.find("import")  # the expression alone, at each line, would take ten times as long
    while at >= 0:
        match = _IMPORT.match(source, source.rfind("\n", 0, at) + 1)
        if match is not None:
            yield match
        at = source.find("import", at + 1 if match is None else max(match.end(), at + 1))

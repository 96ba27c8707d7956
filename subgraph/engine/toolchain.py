"""Object code of kernels: compiled once, kept in the user's cache folder, loaded by llvmlite alone.

A kernel's key is the hash of its module's source and of all modules of this package it imports, its
variant, the versions of numba and llvmlite, and the host. A warm process never imports numba.
Damaged and foreign entries are compiled anew; two processes may fill the cache at once.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import re
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

from subgraph.engine import host
from subgraph.engine.objectfile import undefined_symbols
from subgraph.errors import DeviceError

if TYPE_CHECKING:
    from subgraph.engine.kernel import Kernel

ABI_VERSION = 1
_MAGIC = b"SGKERN01"
_PREFIX = struct.Struct("<8s32sI")  # magic, SHA-256 of the rest, length of the JSON header
_LOG = logging.getLogger("subgraph.engine")
# What compiled code may call: C library, compiler runtime, what threads sleep on, Python's lock.
_ALLOWED = re.compile(
    r"_?(?:(?:exp2?|expm1|log(?:2|10|1p|b)?|pow|sqrt|cbrt|sin|cos|tan|sincos|asin|acos|atan2?"
    r"|sinh|cosh|tanh|asinh|acosh|atanh|erfc?|lgamma|tgamma|fmod|remainder|floor|ceil|trunc"
    r"|round(?:even)?|rint|nearbyint|fabs|fmin|fmax|fma|hypot|ldexp|copysign|modf|frexp)f?"
    r"|mem(?:cpy|move|set|cmp)|bcmp|syscall|sched_yield|clock_gettime|__chkstk|___chkstk_ms"
    r"|PyEval_(?:Save|Restore)Thread|PyLong_(?:AsVoidPtr|FromLongLong)"
    r"|__(?:extendhfsf2|truncsfhf2|truncdfhf2|extendbfsf2|truncsfbf2|truncdfbf2)"
    r"|__(?:divti3|udivti3|modti3|umodti3|multi3))"
)
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(\.?[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n#]+)"
    r"|import[ \t]+([\w., \t]+))",
    re.MULTILINE,
)


class KernelError(DeviceError):
    """A kernel cannot be compiled or loaded."""


@dataclass(frozen=True)
class CompileEvent:
    """Told to listeners before and after a kernel is compiled.

    Attributes:
        kernel: The kernel.
        seconds: None before; how long it took after.
    """

    kernel: Kernel
    seconds: float | None


@dataclass
class Statistics:
    """What the toolchain did in this process: counts, and seconds it took."""

    compiled: int = 0
    loaded: int = 0
    compile_seconds: float = 0.0
    load_seconds: float = 0.0


statistics = Statistics()
_lock = threading.RLock()
_addresses: dict[tuple[Kernel, host.Isa], int] = {}
_listeners: list[Callable[[CompileEvent], None]] = []
_trackers: list[Any] = []  # what keeps loaded code in memory
_library_numbers = itertools.count()
_warned: set[str] = set()


def listen(listener: Callable[[CompileEvent], None]) -> Callable[[], None]:
    """Call ``listener`` before and after every compilation, for a progress display.

    Returns:
        A function that ends it.
    """
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


def address(kernel: Kernel) -> int:
    """Return the machine address of a kernel for the instruction set in force.

    Raises:
        KernelError: It cannot be compiled or loaded.
    """
    isa = host.isa()
    found = _addresses.get((kernel, isa))
    if found is None:
        with _lock:
            found = _addresses.get((kernel, isa))
            if found is None:
                found = _addresses[kernel, isa] = _obtain(kernel, isa)
    return found


def prepare(kernels: Iterable[Kernel]) -> int:
    """Compile or load kernels ahead of their use; return how many had to be compiled."""
    before = statistics.compiled
    for kernel in kernels:
        address(kernel)
    return statistics.compiled - before


def forget(kernel: Kernel) -> None:
    """Make the next use of a kernel look for it in the cache again; loaded code stays loaded."""
    with _lock:
        _addresses.pop((kernel, host.isa()), None)


def cache_folder() -> Path:
    """Return the folder of compiled kernels: ``SUBGRAPH_CACHE_DIR``, else the user's cache."""
    chosen = os.environ.get("SUBGRAPH_CACHE_DIR")
    return (Path(chosen) if chosen else _user_cache()) / "kernels"


@cache
def _user_cache() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("subgraph", appauthor=False)


def _obtain(kernel: Kernel, isa: host.Isa) -> int:
    digest = cache_key(kernel, isa)
    return _cached(kernel.description, digest, lambda symbol: _compile(kernel, symbol, isa))


def native(text: str) -> int:
    """Compile LLVM assembly that defines the function ``@entry``; return its address.

    For glue that numba cannot express, such as a function of Python's C interface.

    Raises:
        KernelError: It cannot be compiled or loaded.
    """
    with _lock:
        digest = hashlib.sha256(f"{text}\0{_environment(host.isa())}".encode()).hexdigest()
        return _cached("native code", digest, lambda symbol: _assemble(text, symbol))


def _assemble(text: str, symbol: str) -> bytes:
    from llvmlite import binding

    _jit()
    try:
        module = binding.parse_assembly(text.replace("@entry", f"@{symbol}"))
        return bytes(_machine().emit_object(module))
    except RuntimeError as error:
        raise KernelError(f"native code: cannot be compiled: {error}") from error


def _cached(what: str, digest: str, make: Callable[[str], bytes]) -> int:
    """Load the entry of a key, or make its object code, keep it, and load that."""
    symbol = f"sg_{digest[:32]}"
    path = cache_folder() / digest[:2] / f"{digest}.sgk"
    start = time.perf_counter()
    entry = _read_entry(path, digest)
    if entry is not None:
        try:
            found = _load(symbol, *entry)
        except (KernelError, RuntimeError) as error:
            _LOG.info("the cached object code of %s is no use: %s", what, error)
        else:
            statistics.loaded += 1
            statistics.load_seconds += time.perf_counter() - start
            return found
    data = make(symbol)
    needed = undefined_symbols(data)
    _check_symbols(what, needed)
    _write_entry(path, digest, needed, data)
    try:
        return _load(symbol, needed, data)
    except RuntimeError as error:
        raise KernelError(f"{what}: cannot be loaded: {error}") from error


def _compile(kernel: Kernel, symbol: str, isa: host.Isa) -> bytes:
    _LOG.info("compiling %s for %s", kernel.description, isa.name)
    _tell(CompileEvent(kernel, None))
    start = time.perf_counter()
    from subgraph.engine import compiler

    try:
        function = compiler.make_function(kernel.module, kernel.factory, dict(kernel.variant))
        data = compiler.compile_object(function, symbol, isa)
    except Exception as error:
        raise KernelError(f"{kernel.description}: cannot be compiled: {error}") from error
    seconds = time.perf_counter() - start
    statistics.compiled += 1
    statistics.compile_seconds += seconds
    _LOG.info("compiled %s in %.0f ms", kernel.description, 1e3 * seconds)
    _tell(CompileEvent(kernel, seconds))
    return data


def _tell(event: CompileEvent) -> None:
    for listener in list(_listeners):
        listener(event)


# ---------------------------------------------------------------- loading


@cache
def _jit() -> Any:
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.create_lljit_compiler(_machine())


def _machine() -> Any:
    from llvmlite import binding

    return binding.Target.from_default_triple().create_target_machine(opt=3, reloc="pic")


@cache
def symbol_address(name: str) -> int:
    """Return the address of a C symbol in this process, 0 when there is none."""
    from llvmlite import binding

    found = int(binding.address_of_symbol(name) or 0)
    return found or _library_symbol(name)


def _library_symbol(name: str) -> int:
    import ctypes
    import ctypes.util

    for library in ("m", "c", "gcc_s"):
        path = ctypes.util.find_library(library)
        try:
            function = getattr(ctypes.CDLL(path), name)
        except (AttributeError, OSError):
            continue
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0


def _check_symbols(what: str, needed: Iterable[str]) -> None:
    for name in needed:
        if not _ALLOWED.fullmatch(name):
            raise KernelError(
                f"{what}: the compiled code calls {name!r}, which kernels may not; "
                "keep Python objects, exceptions and allocation out of the kernel"
            )
        if not symbol_address(name):
            raise KernelError(f"{what}: {name!r} does not exist in this process")


def _load(symbol: str, needed: tuple[str, ...], data: bytes) -> int:
    """Link object code into this process and return the address of its function."""
    from llvmlite import binding

    _check_symbols(symbol, needed)
    builder = binding.JITLibraryBuilder().add_object_img(data).export_symbol(symbol)
    for name in needed:
        builder.import_symbol(name, symbol_address(name))
    tracker = builder.link(_jit(), f"{symbol}.{next(_library_numbers)}")
    _trackers.append(tracker)
    return int(tracker[symbol])


# ---------------------------------------------------------------- keys


def cache_key(kernel: Kernel, isa: host.Isa) -> str:
    """Return the content hash that names a kernel's entry in the cache."""
    text = "\0".join((kernel.description, source_digest(kernel.module), _environment(isa)))
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def _environment(isa: host.Isa) -> str:
    """Return everything outside our sources that shapes the object code."""
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
    parts = (
        str(ABI_VERSION),
        numba,
        str(llvmlite.__version__),
        f"{sys.version_info[0]}.{sys.version_info[1]}",
        sys.platform,
        host.architecture(),
        isa.name,
        isa.cpu,
        isa.features,
    )
    return "\0".join(parts)


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
    for match in _IMPORT.finditer(source):
        origin, names, plain = match.groups()
        if plain is not None:
            found += [name.split()[0] for name in plain.split(",") if name.strip()]
            continue
        if origin.startswith("."):
            origin = f"{package}.{origin[1:]}".rstrip(".")
        found.append(origin)
        found += [f"{origin}.{name}" for name in re.findall(r"\w+", names)]
    return [name for name in found if name.startswith((f"{root}.", "subgraph."))]


# ---------------------------------------------------------------- entries on disk


def _read_entry(path: Path, digest: str) -> tuple[tuple[str, ...], bytes] | None:
    """Return (undefined symbols, object code) of an entry; None when absent or damaged."""
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    try:
        magic, checksum, length = _PREFIX.unpack_from(raw)
        rest = raw[_PREFIX.size :]
        if magic != _MAGIC or hashlib.sha256(rest).digest() != checksum:
            raise ValueError("wrong header or checksum")
        header = json.loads(rest[:length])
        if header["key"] != digest:
            raise ValueError("of another kernel")
        needed = tuple(str(name) for name in header["needs"])
    except (struct.error, ValueError, KeyError, TypeError) as error:
        _LOG.info("ignoring the cache entry %s: %s", path, error)
        return None
    return needed, rest[length:]


def _write_entry(path: Path, digest: str, needed: tuple[str, ...], data: bytes) -> None:
    """Put an entry in the cache, whole or not at all; it is no error when that cannot be."""
    header = json.dumps({"key": digest, "needs": needed}).encode()
    rest = header + data
    raw = _PREFIX.pack(_MAGIC, hashlib.sha256(rest).digest(), len(header)) + rest
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
            temporary = Path(file.name)
            file.write(raw)
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        folder = str(cache_folder())
        if folder not in _warned:
            _warned.add(folder)
            _LOG.warning(
                "compiled kernels cannot be kept in %s (%s): every process compiles them again; "
                "set SUBGRAPH_CACHE_DIR to a folder that can be written",
                folder,
                error,
            )

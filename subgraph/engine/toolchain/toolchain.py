"""From kernels to addresses: object code from the cache, or compiled once and kept there.

A warm process imports neither numba nor, where code is kept as images, LLVM.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from subgraph.engine.toolchain import loader, objectcache
from subgraph.engine.toolchain.keys import cache_key, text_key
from subgraph.engine.toolchain.loader import KernelError as KernelError
from subgraph.engine.toolchain.loader import ObjectCode
from subgraph.engine.toolchain.objectfile import undefined_symbols
from subgraph.graph.limits import check_time
from subgraph.system import host
from subgraph.system.forking import free_in_child, held_while_forking

if TYPE_CHECKING:
    from subgraph.engine.toolchain.kernel import Kernel

_LOG = logging.getLogger("subgraph.engine")


class CompileEvent(NamedTuple):
    """Told to listeners before and after a kernel is compiled.

    Attributes:
        kernel: The kernel.
        seconds: None before; how long it took after.
    """

    kernel: Kernel
    seconds: float | None


class Statistics:
    """What the toolchain did in this process: counts, seconds, whether it said that it compiles."""

    def __init__(self) -> None:
        self.compiled = 0
        self.loaded = 0
        self.compile_seconds = 0.0
        self.load_seconds = 0.0
        self.announced = False


statistics = Statistics()
lock = held_while_forking(threading.RLock())
_statistics_lock = free_in_child(threading.Lock())
_addresses: dict[tuple[Kernel, host.Isa], int] = {}
_listeners: list[Callable[[CompileEvent], None]] = []


def listen(listener: Callable[[CompileEvent], None]) -> Callable[[], None]:
    """Call ``listener`` before and after every compilation, for a progress display.

    It may be called from several threads.

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
        with lock:
            found = _addresses.get((kernel, isa))
            if found is None:
                found = _addresses[kernel, isa] = _obtain(kernel, isa)
    return found


def is_loaded(kernel: Kernel) -> bool:
    """Return whether the machine code of a kernel is in this process already."""
    return (kernel, host.isa()) in _addresses


def is_cached(kernel: Kernel) -> bool:
    """Return whether a kernel is in the cache, so that it need not be compiled."""
    return objectcache.holds(cache_key(kernel, host.isa()))


def prepare(kernels: Iterable[Kernel]) -> int:
    """Compile or load kernels ahead of their use, faster than one by one.

    Many that must be compiled are shared out to other processes, one per core.

    Returns:
        How many had to be compiled.

    Raises:
        KernelError: One cannot be compiled or loaded.
    """
    isa = host.isa()
    with lock:
        before = statistics.compiled
        wanted = [k for k in dict.fromkeys(kernels) if (k, isa) not in _addresses]
        keys = {kernel: cache_key(kernel, isa) for kernel in wanted}
        found = {kernel: objectcache.read(keys[kernel]) for kernel in wanted}
        absent = [kernel for kernel in wanted if found[kernel] is None]
        if absent:
            _compile_absent(absent)
            found.update({kernel: objectcache.read(keys[kernel]) for kernel in absent})
        _load_together({k: code for k, code in found.items() if code is not None}, keys, isa)
        for kernel in wanted:
            address(kernel)
        return statistics.compiled - before


def addresses(kernels: Iterable[Kernel]) -> dict[Kernel, int]:
    """Return the machine addresses of kernels, which are prepared.

    Raises:
        KernelError: One cannot be compiled or loaded.
    """
    wanted = dict.fromkeys(kernels)
    prepare(wanted)
    isa = host.isa()
    return {kernel: _addresses[kernel, isa] for kernel in wanted}


def _compile_absent(kernels: list[Kernel]) -> None:
    from subgraph.engine.toolchain import compile_crew

    kept = objectcache.writable()
    if not _listeners and not statistics.announced:
        # Nobody shows progress, and it may take half a minute.
        statistics.announced = True
        if kept:
            _LOG.warning(
                "compiling %d kernel(s) for this machine, once: they are kept in %s (`subgraph "
                "warmup` compiles the usual ones ahead)",
                len(kernels),
                objectcache.cache_folder(),
            )
        else:
            _LOG.warning("compiling %d kernel(s) for this process", len(kernels))
    workers = compile_crew.worthwhile_workers(len(kernels))
    if workers and kept:
        compile_crew.compile_kernels(kernels, workers, keep)
    else:
        for kernel in kernels:
            keep(kernel)


def keep(kernel: Kernel) -> None:
    """Compile a kernel into the cache, whether or not it is there; without a cache, load it.

    Raises:
        KernelError: It cannot be compiled.
    """
    isa = host.isa()
    key = cache_key(kernel, isa)
    code = _compile(kernel, _symbol(key), isa)
    if not objectcache.write(key, code):
        _addresses[kernel, isa] = loader.load([(_symbol(key), code)])[0]


def _load_together(codes: dict[Kernel, ObjectCode], keys: dict[Kernel, str], isa: host.Isa) -> None:
    if not codes:
        return
    start = time.perf_counter()
    try:
        found = loader.load([(_symbol(keys[kernel]), code) for kernel, code in codes.items()])
    except KernelError as error:
        _LOG.info("loading kernels one by one: %s", error)
        return
    for kernel, at in zip(codes, found, strict=True):
        _addresses[kernel, isa] = at
    statistics.loaded += len(codes)
    statistics.load_seconds += time.perf_counter() - start


def forget(kernel: Kernel) -> None:
    """Make the next use of a kernel look for it in the cache again; loaded code stays loaded."""
    with lock:
        _addresses.pop((kernel, host.isa()), None)


def native(text: str) -> int:
    """Compile LLVM assembly that defines the function ``@entry``; return its address.

    For glue that numba cannot express, such as a function of Python's C interface.

    Raises:
        KernelError: It cannot be compiled or loaded.
    """
    with lock:
        key = text_key(text, host.isa())
        return _cached("native code", key, lambda symbol: _assemble(text, symbol))


def _assemble(text: str, symbol: str) -> ObjectCode:
    from llvmlite import binding

    machine = loader.machine()
    try:
        module = binding.parse_assembly(text.replace("@entry", f"@{symbol}"))
        return _checked("native code", symbol, bytes(machine.emit_object(module)))
    except RuntimeError as error:
        if isinstance(error, KernelError):
            raise
        raise KernelError(f"native code: cannot be compiled: {error}") from error


def _checked(what: str, symbol: str, data: bytes) -> ObjectCode:
    code = ObjectCode(undefined_symbols(data), data)
    loader.check_symbols(what, code.needs)
    return loader.as_image(symbol, code)


def _symbol(key: str) -> str:
    return f"sg_{key[:32]}"


def _obtain(kernel: Kernel, isa: host.Isa) -> int:
    key = cache_key(kernel, isa)
    return _cached(kernel.description, key, lambda symbol: _compile(kernel, symbol, isa))


def _cached(what: str, key: str, make: Callable[[str], ObjectCode]) -> int:
    """Load the entry of a key, or make its object code, keep it, and load that."""
    symbol = _symbol(key)
    start = time.perf_counter()
    code = objectcache.read(key)
    if code is not None:
        try:
            found = loader.load([(symbol, code)])[0]
        except KernelError as error:
            _LOG.info("the cached object code of %s is no use: %s", what, error)
        else:
            statistics.loaded += 1
            statistics.load_seconds += time.perf_counter() - start
            return found
    code = make(symbol)
    objectcache.write(key, code)
    try:
        return loader.load([(symbol, code)])[0]
    except KernelError as error:
        raise KernelError(f"{what}: {error}") from error


def _compile(kernel: Kernel, symbol: str, isa: host.Isa) -> ObjectCode:
    check_time(f"compiling kernel {kernel.factory!r} of {kernel.module}")
    _LOG.info("compiling %s for %s", kernel.description, isa.name)
    tell(CompileEvent(kernel, None))
    start = time.perf_counter()
    from subgraph.engine.toolchain import compiler

    try:
        function = compiler.make_function(kernel.module, kernel.factory, dict(kernel.variant))
        data = compiler.compile_object(function, symbol, isa)
    except Exception as error:
        raise KernelError(f"{kernel.description}: cannot be compiled: {error}") from error
    code = _checked(kernel.description, symbol, data)
    tell(CompileEvent(kernel, time.perf_counter() - start))
    return code


def tell(event: CompileEvent) -> None:
    """Count a compilation and tell the listeners of it."""
    if event.seconds is not None:
        with _statistics_lock:
            statistics.compiled += 1
            statistics.compile_seconds += event.seconds
        _LOG.info("compiled %s in %.0f ms", event.kernel.description, 1e3 * event.seconds)
    for listener in list(_listeners):
        listener(event)

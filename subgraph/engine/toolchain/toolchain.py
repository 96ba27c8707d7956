"""From a kernel to its machine address.

The code of a kernel is looked for, in this order, among

1. the functions that this process has loaded (`address`),
2. the kernels that came with the package (`prebuilt`),
3. the code of an exported and signed model that this process imported (`add_imported_code`),
4. the user's cache folder (`subgraph.system.objectcache`),

and is compiled and written to the cache if it is in none of them. A process that compiles nothing
does not import numba, nor LLVM if all code is stored as images (`objectfile`).
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NamedTuple

from subgraph.engine.toolchain import compile_display, compile_workers, loader, prebuilt
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.engine.toolchain.keys import cache_key, symbol_of
from subgraph.engine.toolchain.loader import KernelError as KernelError
from subgraph.engine.toolchain.objectfile import undefined_symbols
from subgraph.errors import ConfigError, described
from subgraph.graph.limits import check_time
from subgraph.system import host, objectcache
from subgraph.system.forking import free_in_child, held_while_forking
from subgraph.system.objectcache import ObjectCode

_LOG = logging.getLogger("subgraph.engine")


class CompileEvent(NamedTuple):
    """The argument of the listeners of `watch_compilation`.

    Attributes:
        kernel: The kernel whose compilation begins or has ended.
        seconds: Seconds that the compilation took; None when it begins.
        done: Number of kernels that this process has compiled.
        total: Number of kernels that this process has compiled or knows that it must compile. It
            may grow when another model is compiled.
    """

    kernel: Kernel
    seconds: float | None
    done: int
    total: int


class Statistics:
    """Counts of compiled and loaded kernels in this process, and the seconds of compilations.

    Attributes:
        compiled: Kernels compiled by this process and its workers.
        expected: Kernels compiled, or known to be compiled next.
        loaded: Kernels loaded from stored code.
        compile_seconds: Sum of the compilations' seconds; workers compile at the same time.
        announced: Whether a warning in the log has said that kernels are compiled.
    """

    def __init__(self) -> None:
        self.compiled = 0
        self.expected = 0
        self.loaded = 0
        self.compile_seconds = 0.0
        self.announced = False


statistics = Statistics()
_Definition = tuple[str, ObjectCode]  # a function's symbol and the code that defines it
# Held while kernels are looked for, compiled and loaded. It is also taken around a fork, so that a
# child never inherits a half-done compilation.
lock = held_while_forking(threading.RLock())
_statistics_lock = free_in_child(threading.Lock())
_addresses: dict[tuple[Kernel, host.Isa], int] = {}
_listeners: list[Callable[[CompileEvent], None]] = []
_imported: dict[str, ObjectCode] = {}  # by cache key: see `add_imported_code`
_recorded: dict[Kernel, None] | None = None  # what `recording` yields; None outside of it


def watch_compilation(listener: Callable[[CompileEvent], None]) -> Callable[[], None]:
    """Call a function before and after every compilation of a kernel, to show progress.

    While there is a listener, Subgraph itself shows no progress.

    Args:
        listener: Called with a `CompileEvent`, possibly from several threads. If it raises, the
            error is logged, and it is called no more; the compilation goes on.

    Returns:
        A function that removes the listener.

    Raises:
        ConfigError: ``listener`` cannot be called.
    """
    if not callable(listener):
        raise ConfigError(
            f"watch_compilation takes a function that takes a CompileEvent, got {listener!r}"
        )
    _listeners.append(listener)
    return lambda: _remove(listener)


def _remove(listener: Callable[[CompileEvent], None]) -> None:
    with suppress(ValueError):  # it has raised, or was removed before
        _listeners.remove(listener)


def address(kernel: Kernel) -> int:
    """Return the machine address of a kernel for the instruction set in force.

    The first call loads or compiles the kernel.

    Raises:
        KernelError: The kernel cannot be compiled or loaded.
    """
    isa = host.isa()
    found = _addresses.get((kernel, isa))
    if found is None:
        with lock:
            found = _addresses.get((kernel, isa))
            if found is None:
                found = _addresses[kernel, isa] = _load_or_compile(kernel, isa)
    return found


def is_loaded(kernel: Kernel) -> bool:
    """Return whether this process has loaded the machine code of a kernel."""
    return (kernel, host.isa()) in _addresses


def is_cached(kernel: Kernel) -> bool:
    """Return whether stored code of a kernel exists; it is not read, and may prove damaged."""
    isa = host.isa()
    return prebuilt.holds(kernel, isa) or objectcache.holds(cache_key(kernel, isa))


def prepare(kernels: Iterable[Kernel]) -> int:
    """Load kernels before their use, compiling those that have no stored code.

    Faster than `address` for each: loads are batched, and worker processes help to compile
    (`compile_workers`).

    Returns:
        Number of kernels that were compiled.

    Raises:
        KernelError: A kernel cannot be compiled or loaded.
    """
    isa = host.isa()
    with lock:
        before = statistics.compiled
        wanted = [k for k in dict.fromkeys(kernels) if (k, isa) not in _addresses]
        if _recorded is not None:
            return len([address(kernel) for kernel in wanted])
        found = {kernel: next(_stored(kernel, isa), None) for kernel in wanted}
        absent = [kernel for kernel in wanted if found[kernel] is None]
        if absent:
            _compile_absent(absent)
            found.update({kernel: next(_stored(kernel, isa), None) for kernel in absent})
        _load_together({k: code for k, code in found.items() if code is not None}, isa)
        for kernel in wanted:
            address(kernel)
        return statistics.compiled - before


def addresses(kernels: Iterable[Kernel]) -> dict[Kernel, int]:
    """Prepare kernels and return their machine addresses.

    Raises:
        KernelError: A kernel cannot be compiled or loaded.
    """
    wanted = dict.fromkeys(kernels)
    prepare(wanted)
    isa = host.isa()
    return {kernel: _addresses[kernel, isa] for kernel in wanted}


def add_imported_code(codes: Mapping[str, ObjectCode]) -> None:
    """Add the code that an imported model brought along to the sources of stored code.

    Args:
        codes: Code by cache key. The caller has checked the model's signature, as it is executed.
    """
    _imported.update(codes)


def object_code(kernel: Kernel) -> ObjectCode | None:
    """Return a kernel's stored code, linked where possible, to export it; None if there is none."""
    found = next(_stored(kernel, host.isa()), None)
    return None if found is None else loader.as_image(*found)


def _stored(kernel: Kernel, isa: host.Isa) -> Iterator[_Definition]:
    """Yield the symbol and code of a kernel from each place that stores it, the best first."""
    packed = prebuilt.find(kernel, isa)
    if packed is not None:
        yield packed
    with _errors_about(kernel):
        key = cache_key(kernel, isa)
    if key in _imported:
        yield symbol_of(key), _imported[key]
    code = objectcache.read(key)
    if code is not None:
        yield symbol_of(key), code


@contextmanager
def _expecting(count: int) -> Generator[None]:
    """Count kernels as expected while the body compiles them.

    Afterwards, also after an error, no more kernels are expected than are compiled.
    """
    with _statistics_lock:
        statistics.expected += count
    try:
        yield
    finally:
        with _statistics_lock:
            statistics.expected = statistics.compiled
        compile_display.clear()


def _compile_absent(kernels: list[Kernel]) -> None:
    """Compile kernels into the cache, with worker processes if they are many."""
    writable = objectcache.writable()
    if not _listeners and not statistics.announced:
        # Nobody listens for progress, and compilation may take half a minute.
        statistics.announced = True
        if writable:
            _LOG.warning(
                "compiling %d kernel(s) for this machine, once: they are cached in %s (`subgraph "
                "warmup` compiles the usual ones ahead)",
                len(kernels),
                objectcache.cache_folder(),
            )
        else:
            _LOG.warning("compiling %d kernel(s) for this process", len(kernels))
    workers = compile_workers.worker_count(len(kernels))
    with _expecting(len(kernels)):
        if workers and writable:  # workers pass their results through the cache folder
            compile_workers.compile_kernels(kernels, workers, compile_to_cache, _report)
        else:
            for kernel in kernels:
                compile_to_cache(kernel)


def compile_for_level(kernel: Kernel) -> ObjectCode:
    """Return the code of a kernel to be shipped with the package, for the instruction set in force.

    Its ``features`` are those that were queried during its compilation, with the answers. Its
    symbol is that of its `prebuilt.kernel_key`. The code is cached under a key of its own.

    Raises:
        KernelError: The kernel cannot be compiled.
    """
    isa = host.isa()
    key = f"{cache_key(kernel, isa)}-level"
    code = objectcache.read(key)
    if code is None:
        with host.recorded_features() as features:
            made = _compile(kernel, symbol_of(prebuilt.kernel_key(kernel)), isa)
        code = made._replace(features=tuple(sorted(features.items())))
        objectcache.write(key, code)
    return code


def compile_to_cache(kernel: Kernel) -> None:
    """Compile a kernel and write its code to the cache; if that fails, load the code at once.

    Raises:
        KernelError: The kernel cannot be compiled.
    """
    isa = host.isa()
    key = cache_key(kernel, isa)
    with _errors_about(kernel):
        code = _compile(kernel, symbol_of(key), isa)
    if not objectcache.write(key, code):
        _addresses[kernel, isa] = loader.load([(symbol_of(key), code)])[0]


def _load_together(codes: dict[Kernel, _Definition], isa: host.Isa) -> None:
    """Load kernels in one batch; after an error none is loaded, and `address` loads each alone."""
    if not codes:
        return
    try:
        found = loader.load(list(codes.values()))
    except KernelError as error:
        _LOG.info("loading kernels one by one: %s", error)
        return
    for kernel, at in zip(codes, found, strict=True):
        _addresses[kernel, isa] = at
    statistics.loaded += len(codes)


def forget(kernel: Kernel) -> None:
    """Have the next use of a kernel look for its code again; loaded code stays in memory."""
    with lock:
        _addresses.pop((kernel, host.isa()), None)


@contextmanager
def recording() -> Generator[dict[Kernel, None]]:
    """Replace every kernel by an empty function within the body, and record the kernels.

    It is how `make kernels` finds the kernels that models need on another machine. Models that run
    meanwhile in this process compute nothing.

    Yields:
        The kernels in the order of their first use, filled meanwhile.
    """
    global _recorded
    recorded: dict[Kernel, None] = {}
    _recorded = recorded
    try:
        yield recorded
    finally:
        _recorded = None
        with lock:
            for key in [key for key in _addresses if key[0] in recorded]:
                del _addresses[key]


@cache
def _empty_kernel() -> Any:
    """Return an empty function with the signature of a kernel."""
    words = [ctypes.c_int64] * 4
    return ctypes.CFUNCTYPE(None, *words)(lambda *_words: None)


def _load_or_compile(kernel: Kernel, isa: host.Isa) -> int:
    """Load a kernel's stored code, or compile it; return the function's address."""
    if _recorded is not None:
        _recorded[kernel] = None
        return ctypes.cast(_empty_kernel(), ctypes.c_void_p).value or 0
    for stored in _stored(kernel, isa):
        try:
            found = loader.load([stored])[0]
        except KernelError as error:
            _LOG.info(
                "the stored object code of %s cannot be loaded: %s", kernel.description, error
            )
        else:
            statistics.loaded += 1
            return found
    key = cache_key(kernel, isa)
    with _expecting(1), _errors_about(kernel):
        code = _compile(kernel, symbol_of(key), isa)
        objectcache.write(key, code)
        try:
            return loader.load([(symbol_of(key), code)])[0]
        except KernelError as error:
            raise KernelError(f"{kernel.description}: {error}") from error


@contextmanager
def _errors_about(kernel: Kernel) -> Generator[None]:
    """Record the kernel in a KernelError that the body raises, for a caller that knows its node."""
    try:
        yield
    except KernelError as error:
        error.kernel = kernel.description
        raise


def _compile(kernel: Kernel, symbol: str, isa: host.Isa) -> ObjectCode:
    """Compile a kernel as a function with a symbol, and report its progress.

    Raises:
        KernelError: The kernel cannot be compiled, or calls what kernels may not.
    """
    check_time(f"compiling kernel {kernel.factory!r} of {kernel.module}")
    _LOG.info("compiling %s for %s", kernel.description, isa.name)
    _report(kernel, None)
    start = time.perf_counter()
    from subgraph.engine.toolchain import compiler

    try:
        function = compiler.make_function(kernel.module, kernel.factory, dict(kernel.variant))
        data = compiler.compile_object(function, symbol, isa)
    except Exception as error:
        raise KernelError(
            f"{kernel.description}: cannot be compiled: {described(error)}"
        ) from error
    code = ObjectCode(undefined_symbols(data), data)
    loader.check_symbols(kernel.description, code.needs)
    code = loader.as_image(symbol, code)
    _report(kernel, time.perf_counter() - start)
    return code


def _report(kernel: Kernel, seconds: float | None) -> None:
    """Count a compilation, then call the listeners or, without any, show the progress.

    Args:
        kernel: The kernel whose compilation begins or has ended.
        seconds: Seconds that the compilation took; None when it begins.
    """
    with _statistics_lock:
        if seconds is not None:
            statistics.compiled += 1
            statistics.compile_seconds += seconds
        statistics.expected = max(statistics.expected, statistics.compiled)
        event = CompileEvent(kernel, seconds, statistics.compiled, statistics.expected)
    if seconds is not None:
        _LOG.info(
            "compiled %s in %.0f ms (%d/%d)",
            kernel.description,
            1e3 * seconds,
            event.done,
            event.total,
        )
    for listener in list(_listeners):
        try:
            listener(event)
        except Exception as error:
            _remove(listener)
            _LOG.warning(
                "a callback of watch_compilation raised %s: %s; it is called no more",
                *(type(error).__name__, error),
                exc_info=error,
            )
    if not _listeners:
        compile_display.show(event.done, event.total, kernel.factory)

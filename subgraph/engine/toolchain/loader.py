"""Loads object code into this process: images by mapping them, other objects by LLVM's JIT linker.

The undefined symbols of the code are checked first: kernels may call only the functions listed
here, and a symbol that this process does not have is an error instead of an abort inside LLVM.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

from subgraph.engine.toolchain import targets
from subgraph.engine.toolchain.objectfile import link_image
from subgraph.errors import DeviceError
from subgraph.system.objectcache import ObjectCode
from subgraph.weights.mapped_files import release_library

# The functions that kernels may call, of the C library, the compiler runtime and Python's C API.
_MATH = (
    "exp exp2 expm1 log log2 log10 log1p logb pow sqrt cbrt sin cos tan sincos asin acos atan atan2"
    " sinh cosh tanh asinh acosh atanh erf erfc lgamma tgamma fmod remainder floor ceil trunc round"
    " roundeven rint nearbyint fabs fmin fmax fma hypot ldexp copysign modf frexp"
)
_OTHERS = (
    "memcpy memmove memset memcmp bcmp syscall sched_yield sched_getcpu sched_getaffinity"
    " sched_setaffinity clock_gettime __chkstk ___chkstk_ms"
    " PyEval_SaveThread PyEval_RestoreThread PyLong_AsVoidPtr PyLong_FromLongLong __extendhfsf2"
    " __truncsfhf2 __truncdfhf2 __extendbfsf2 __truncsfbf2 __truncdfbf2 __divti3 __udivti3 __modti3"
    " __umodti3 __multi3"
)
_ALLOWED = frozenset([*_MATH.split(), *(f"{n}f" for n in _MATH.split()), *_OTHERS.split()])


class KernelError(DeviceError):
    """A kernel cannot be compiled, or its code cannot be loaded.

    Attributes:
        kernel: Description of the kernel; "" if it is not about one.
    """

    kernel = ""


_ALIGN, _WORD = 64, 8  # bytes: alignment of an image (a cache line), and of an address in its table
_trackers: list[Any] = []  # LLVM's handles of linked code; LLVM unloads code without a handle
_numbers = itertools.count()  # makes the names of LLVM's libraries unique


@cache
def _jit() -> Any:
    """Return LLVM's just-in-time linker of this process."""
    from llvmlite import binding

    return binding.create_lljit_compiler(targets.machine())


def release_llvm() -> None:
    """Give the pages of LLVM's own library back to the system if it is loaded.

    They are tens of megabytes, needed for compiling and linking only, and are read again on use.
    """
    if "llvmlite.binding" in sys.modules:
        release_library("libllvmlite")


@cache
def symbol_address(name: str) -> int:
    """Return the address of a C symbol in this process; 0 if there is none."""
    for library in _libraries():
        try:
            function = getattr(ctypes.CDLL(library), name)
        except (AttributeError, OSError, TypeError):
            continue
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0


def _libraries() -> Iterator[str | None]:
    """Yield libraries to search for symbols; `find_library`, which may start a process, last."""
    yield None  # ctypes' name of everything that is loaded already
    if sys.platform.startswith("linux"):
        yield from ("libm.so.6", "libgcc_s.so.1")
    import ctypes.util

    for library in ("m", "c", "gcc_s"):
        yield ctypes.util.find_library(library)


def check_symbols(what: str, needs: Iterable[str]) -> None:
    """Raise an error unless all undefined symbols of object code may be and can be linked.

    Args:
        what: Name of the code, with which messages begin.
        needs: The undefined symbols.

    Raises:
        KernelError: Kernels may not call a symbol, or this process does not have it.
    """
    for name in needs:
        if name not in _ALLOWED and name.removeprefix("_") not in _ALLOWED:
            raise KernelError(
                f"{what}: the compiled code calls {name!r}, which kernels may not; "
                "keep Python objects, exceptions and allocation out of the kernel"
            )
        if not symbol_address(name):
            raise KernelError(f"{what}: {name!r} does not exist in this process")


def load(objects: Sequence[tuple[str, ObjectCode]]) -> list[int]:
    """Load object code for the rest of the process's life.

    Args:
        objects: Pairs of a function's symbol and the code that defines it.

    Returns:
        The addresses of the functions, in the order of the objects.

    Raises:
        KernelError: Code has an undefined symbol that `check_symbols` rejects, is damaged, or is
            rejected by LLVM's linker or the operating system.
    """
    for symbol, code in objects:
        check_symbols(symbol, code.needs)
    codes = [(symbol, as_image(symbol, code)) for symbol, code in objects]
    images = [code for _, code in codes if code.start is not None]
    others = [(symbol, code) for symbol, code in codes if code.start is None]
    at_images, at_others = iter(_map(images)), iter(_link(others))
    return [next(at_others if code.start is None else at_images) for _, code in codes]


def as_image(symbol: str, code: ObjectCode) -> ObjectCode:
    """Return object code linked as an image if `objectfile` can link it, else the code unchanged.

    Args:
        symbol: Name of the function that the code defines.
        code: An object file or an image.

    Raises:
        KernelError: The function's offset lies outside the image: the code is damaged.
    """
    image = link_image(code.data, symbol, code.needs) if code.start is None else None
    made = code if image is None else ObjectCode(code.needs, image.data, image.start)
    if made.start is not None and not 0 <= made.start < len(made.data) - _WORD * len(made.needs):
        raise KernelError(
            f"{symbol}: the function begins at {made.start} of {len(made.data)} bytes of code and "
            f"{len(made.needs)} addresses; the object code is damaged: remove it from the cache"
        )
    return made


def _map(images: Sequence[ObjectCode]) -> list[int]:
    """Copy images into memory that is executable and read-only; return the functions' addresses.

    One mapping holds all images, because a mapping takes whole pages.
    """
    if not images:
        return []
    offsets: list[int] = []
    size = 0
    for image in images:
        offsets.append(size)
        size += -(-len(image.data) // _ALIGN) * _ALIGN
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for at, image in zip(offsets, images, strict=True):
        table = at + len(image.data) - _WORD * len(image.needs)
        addresses = map(symbol_address, image.needs)
        memory[at : at + len(image.data)] = image.data
        struct.pack_into(f"={len(image.needs)}Q", memory, table, *addresses)
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, length = ctypes.c_void_p(begin), ctypes.c_size_t(size)
    if libc.mprotect(pointer, length, mmap.PROT_READ | mmap.PROT_EXEC):
        reason = os.strerror(ctypes.get_errno())
        raise KernelError(f"compiled code cannot be made executable: {reason}")
    # The extra reference keeps the mapping past the interpreter's end: helpers may still run it.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
    return [begin + at + (image.start or 0) for at, image in zip(offsets, images, strict=True)]


def _link(objects: Sequence[tuple[str, ObjectCode]]) -> list[int]:
    """Link object files together by LLVM; return the functions' addresses."""
    if not objects:
        return []
    from llvmlite import binding

    builder = binding.JITLibraryBuilder()
    try:
        for symbol, code in objects:
            builder.add_object_img(code.data).export_symbol(symbol)
        if not sys.platform.startswith("linux"):
            builder.add_current_process()  # only of ELF objects are the undefined symbols known
        for name in sorted({name for _, code in objects for name in code.needs}):
            builder.import_symbol(name, symbol_address(name))
        tracker = builder.link(_jit(), f"subgraph.{next(_numbers)}")
    except RuntimeError as error:
        raise KernelError(f"object code cannot be loaded: {error}") from error
    _trackers.append(tracker)
    return [int(tracker[symbol]) for symbol, _ in objects]

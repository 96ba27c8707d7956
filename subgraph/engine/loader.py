"""Linking object code into this process, with llvmlite alone.

What the code may call is checked before it is linked: a missing symbol is an error, never an abort.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import itertools
import re
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

from subgraph.engine.mapped import release_library
from subgraph.errors import DeviceError

# C library, compiler runtime, what threads sleep on, Python's lock.
_ALLOWED = re.compile(
    r"_?(?:(?:exp2?|expm1|log(?:2|10|1p|b)?|pow|sqrt|cbrt|sin|cos|tan|sincos|asin|acos|atan2?"
    r"|sinh|cosh|tanh|asinh|acosh|atanh|erfc?|lgamma|tgamma|fmod|remainder|floor|ceil|trunc"
    r"|round(?:even)?|rint|nearbyint|fabs|fmin|fmax|fma|hypot|ldexp|copysign|modf|frexp)f?"
    r"|mem(?:cpy|move|set|cmp)|bcmp|syscall|sched_yield|clock_gettime|__chkstk|___chkstk_ms"
    r"|PyEval_(?:Save|Restore)Thread|PyLong_(?:AsVoidPtr|FromLongLong)"
    r"|__(?:extendhfsf2|truncsfhf2|truncdfhf2|extendbfsf2|truncsfbf2|truncdfbf2)"
    r"|__(?:divti3|udivti3|modti3|umodti3|multi3))"
)


class KernelError(DeviceError):
    """A kernel cannot be compiled or loaded."""


class ObjectCode(NamedTuple):
    """A relocatable object file and the names that it needs from outside."""

    needs: tuple[str, ...]
    data: bytes


_trackers: list[Any] = []  # what keeps linked code in memory
_numbers = itertools.count()


@cache
def _jit() -> Any:
    from llvmlite import binding

    return binding.create_lljit_compiler(machine())


def machine() -> Any:
    """Return an LLVM target machine of this host without special instructions."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.Target.from_default_triple().create_target_machine(opt=3, reloc="pic")


def rest() -> None:
    """Give LLVM's own code back to the system: tens of megabytes that are only read to link."""
    release_library("libllvmlite")


@cache
def symbol_address(name: str) -> int:
    """Return the address of a C symbol in this process, 0 when there is none."""
    from llvmlite import binding

    found = int(binding.address_of_symbol(name) or 0)
    return found or _library_symbol(name)


def _library_symbol(name: str) -> int:
    for library in ("m", "c", "gcc_s"):
        path = ctypes.util.find_library(library)
        try:
            function = getattr(ctypes.CDLL(path), name)
        except (AttributeError, OSError, TypeError):
            continue
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0


def check_symbols(what: str, needs: Iterable[str]) -> None:
    """Make sure that code needs nothing but what it may use and what there is.

    Raises:
        KernelError: It does; the message begins with ``what``.
    """
    for name in needs:
        if not _ALLOWED.fullmatch(name):
            raise KernelError(
                f"{what}: the compiled code calls {name!r}, which kernels may not; "
                "keep Python objects, exceptions and allocation out of the kernel"
            )
        if not symbol_address(name):
            raise KernelError(f"{what}: {name!r} does not exist in this process")


def load(objects: Sequence[tuple[str, ObjectCode]]) -> list[int]:
    """Link object files into this process at one go.

    Args:
        objects: Pairs of the name of a function and the code that defines it.

    Returns:
        The addresses of the functions.

    Raises:
        KernelError: One of them needs what it may not use, or is no object file.
    """
    from llvmlite import binding

    builder = binding.JITLibraryBuilder()
    needs: set[str] = set()
    for symbol, code in objects:
        check_symbols(symbol, code.needs)
        needs.update(code.needs)
    try:
        for symbol, code in objects:
            builder.add_object_img(code.data).export_symbol(symbol)
        if not sys.platform.startswith("linux"):
            builder.add_current_process()  # there the list of needs is not known
        for name in sorted(needs):
            builder.import_symbol(name, symbol_address(name))
        tracker = builder.link(_jit(), f"subgraph.{next(_numbers)}")
    except RuntimeError as error:
        raise KernelError(f"object code cannot be loaded: {error}") from error
    _trackers.append(tracker)
    return [int(tracker[symbol]) for symbol, _ in objects]

"""Numba's frontend, without what a kernel does not need of it; used by the compiler.

Numba compiles functions that Python may call, over any of its types. A kernel is called by compiled
code, computes with numbers and vectors, and is optimised once, as a whole, by our own target
machine. What follows from that, each with its share, makes numba's frontend twice as fast.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from numba.core import dispatcher, types
from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
from numba.core.compiler import DefaultPassBuilder
from numba.core.compiler_machinery import PassManager
from numba.core.dispatcher import Dispatcher
from numba.core.typed_passes import (
    IRLegalization,
    NativeLowering,
    NoPythonBackend,
    NopythonTypeInference,
    PreLowerStripPhis,
)
from numba.core.typing.context import BaseContext
from numba.core.untyped_passes import (
    DeadBranchPrune,
    FixupArgs,
    GenericRewrites,
    IRProcessing,
    ReconstructSSA,
    RewriteSemanticConstants,
    TranslateByteCode,
)

from subgraph.engine.codegen.argument_views import ArgumentsView
from subgraph.engine.codegen.irtools import VecType

# Left out of numba's own: closures within a kernel, `with`, literal_unroll, array expressions.
_PASSES = (
    TranslateByteCode,
    FixupArgs,
    IRProcessing,
    RewriteSemanticConstants,
    DeadBranchPrune,
    GenericRewrites,
    ReconstructSSA,
    DeadBranchPrune,
    NopythonTypeInference,
    PreLowerStripPhis,
    IRLegalization,
    NativeLowering,
    NoPythonBackend,
)
_HELPERS: type = vars(dispatcher)["_FunctionCompiler"]  # compiles what kernels call
_VALUES = (types.Number, types.Boolean, VecType, ArgumentsView)


@contextmanager
def helpers_as_written() -> Generator[None]:
    """Let numba leave the functions that a kernel calls as they are: ours are optimised once.

    Its own passes over each of them, whose result is inlined and optimised again, take a third of
    the time and unroll loops twice; machine code of each alone, with all that it calls, is never
    run. The collector would look at all that a compilation makes, too.
    """
    seen: list[tuple[Any, Any]] = []
    stand_ins: list[tuple[type, str, Any]] = [
        (JITCodeLibrary, "_optimize_functions", _nothing),
        (JITCodeLibrary, "_optimize_final_module", _nothing),
        (JITCodeLibrary, "_finalize_specific", _nothing),
        (JITCodeLibrary, "get_pointer_to_function", _nowhere),
        (JITCPUCodegen, "_add_module", _nothing),
        (JITCPUCodegen, "set_env", _nothing),
        (Dispatcher, "add_overload", _adding(seen)),
        (_HELPERS, "_customize_flags", _without_wrappers),
        (BaseContext, "resolve_function_type", _remembering(BaseContext.resolve_function_type)),
    ]
    was_on = gc.isenabled()
    gc.disable()
    try:
        with _replaced(stand_ins):
            yield
    finally:
        _forget(seen)
        if was_on:
            gc.enable()


@contextmanager
def few_passes() -> Generator[None]:
    """Let numba run only the passes that a kernel of ours needs; what fails is to be tried without.

    Nor does a helper remember then that it failed.
    """
    with _replaced(
        [
            (DefaultPassBuilder, "define_nopython_pipeline", staticmethod(_pipeline)),
            (_HELPERS, "_compile_cached", _compiled_now),
        ]
    ):
        yield


@contextmanager
def _replaced(stand_ins: list[tuple[type, str, Any]]) -> Generator[None]:
    """Put something in the place of attributes of classes for a while."""
    own = [vars(kind).get(name) for kind, name, _ in stand_ins]
    try:
        for kind, name, stand_in in stand_ins:
            setattr(kind, name, stand_in)
        yield
    finally:
        for (kind, name, _), before in zip(stand_ins, own, strict=True):
            if before is None:
                delattr(kind, name)
            else:
                setattr(kind, name, before)


def _pipeline(_state: Any, name: str = "nopython") -> PassManager:
    manager = PassManager(name)
    for step in _PASSES:
        manager.add_pass(step, step.name())
    manager.finalize()
    return manager


def _compiled_now(compiler: Any, args: Any, return_type: Any) -> tuple[bool, Any]:
    """Stand in for a helper's compilation that keeps errors."""
    return True, compiler._compile_core(args, return_type)


def _nothing(*_arguments: Any) -> None:
    """Stand in for a step of numba's that is left out."""


def _nowhere(_library: Any, _name: str) -> int:
    """Stand in for the address of a helper alone, which nobody calls."""
    return 0


def _without_wrappers(_compiler: Any, flags: Any) -> Any:
    """Stand in for a helper's flags: neither Python nor C calls it."""
    flags.no_cpython_wrapper = True
    flags.no_cfunc_wrapper = True
    return flags


def _adding(seen: list[tuple[Any, Any]]) -> Callable[[Any, Any], None]:
    """Return what adds a compiled helper to its dispatcher, and notes those that Python sees.

    Python could not call the result: there is no machine code.
    """
    add = Dispatcher.add_overload

    def added(owner: Any, result: Any) -> None:
        if owner.targetoptions.get("no_cpython_wrapper"):  # of `overload`, `register_jitable`
            add(owner, result)
        else:
            owner.overloads[tuple(result.signature.args)] = result
            seen.append((owner, result))

    return added


def _forget(seen: list[tuple[Any, Any]]) -> None:
    """Let functions that Python sees be compiled anew when Python calls them."""
    for owner, result in seen:
        owner.targetctx.remove_user_function(result.entry_point)
        del owner.overloads[tuple(result.signature.args)]


def _remembering(resolve: Callable[..., Any]) -> Callable[..., Any]:
    """Return numba's resolution of a call, which remembers what it said of numbers.

    Types are inferred in rounds, and each asks what ``int64 + int64`` is of every addition, down to
    NumPy's rules for arrays: most of the time of a kernel of plain arithmetic.
    """
    known: dict[Any, Any] = {}

    def resolved(context: Any, function: Any, args: Any, kws: Any) -> Any:
        plain = not kws and isinstance(function, types.Function)
        if not plain or not all(isinstance(arg, _VALUES) for arg in args):
            return resolve(context, function, args, kws)
        key = (function, *args)
        if key not in known:
            known[key] = resolve(context, function, args, kws)
        return known[key]

    return resolved

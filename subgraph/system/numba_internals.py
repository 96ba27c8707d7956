"""Interfaces of numba that its documentation does not promise: no other module imports them.

The first part is what types and operators of one's own are made of (`AttributeTemplate`, `cgutils`
and others). The second is numba's compiler in pieces. A kernel is called by compiled code, computes
with numbers and vectors, and is optimised once, as a whole, by a target machine of our own; what is
left out for that makes numba's frontend twice as fast. Where a version of numba lacks one of these
pieces, `pieces` raises `MissingInterface`, and `subgraph.engine.toolchain.compiler` goes by numba's
public interface instead.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

from numba import types
from numba.core import cgutils as cgutils
from numba.core.typeconv.castgraph import Conversion as Conversion
from numba.core.typing.templates import AbstractTemplate as AbstractTemplate
from numba.core.typing.templates import AttributeTemplate as AttributeTemplate
from numba.core.typing.templates import infer_global as infer_global
from numba.core.typing.templates import signature as signature


class MissingInterface(Exception):
    """This version of numba has no such interface."""


# In this order; left out of numba's own: closures within a kernel, `with`, literal_unroll, array
# expressions.
_UNTYPED = (
    *("TranslateByteCode", "FixupArgs", "IRProcessing", "RewriteSemanticConstants"),
    *("DeadBranchPrune", "GenericRewrites", "ReconstructSSA", "DeadBranchPrune"),
)
_TYPED = (
    *("NopythonTypeInference", "PreLowerStripPhis", "IRLegalization", "NativeLowering"),
    "NoPythonBackend",
)


@cache
def pieces() -> SimpleNamespace:
    """Return the classes and objects of numba's compiler that this module works with.

    Raises:
        MissingInterface: This version of numba lacks one of them.
    """
    try:
        from numba.core import (
            codegen,
            compiler,
            cpu_options,
            dispatcher,
            registry,
            typed_passes,
            untyped_passes,
        )
        from numba.core.compiler_lock import global_compiler_lock
        from numba.core.compiler_machinery import PassManager
        from numba.core.typing.context import BaseContext

        found = SimpleNamespace(
            compiler=compiler,
            cpu=registry.cpu_target,
            lock=global_compiler_lock,
            fast_math=cpu_options.FastMathOptions,
            aot_library=codegen.AOTCodeLibrary,
            aot_codegen=codegen.AOTCPUCodegen,
            library=codegen.JITCodeLibrary,
            codegen=codegen.JITCPUCodegen,
            builder=compiler.DefaultPassBuilder,
            manager=PassManager,
            dispatcher=dispatcher.Dispatcher,
            helpers=vars(dispatcher)["_FunctionCompiler"],  # compiles what kernels call
            context=BaseContext,
            passes=[vars(untyped_passes)[name] for name in _UNTYPED]
            + [vars(typed_passes)[name] for name in _TYPED],
        )
        for kind, name in _REPLACED:
            getattr(vars(found)[kind], name)
    except (ImportError, AttributeError, KeyError) as error:
        raise MissingInterface(f"{type(error).__name__}: {error}") from error
    return found


# The attributes that `helpers_as_written` and `few_passes` replace for a while.
_REPLACED = (
    *(("library", "_optimize_functions"), ("library", "_optimize_final_module")),
    *(("library", "_finalize_specific"), ("library", "get_pointer_to_function")),
    *(("codegen", "_add_module"), ("codegen", "set_env"), ("dispatcher", "add_overload")),
    *(("helpers", "_customize_flags"), ("helpers", "_compile_cached")),
    *(("context", "resolve_function_type"), ("builder", "define_nopython_pipeline")),
)


def make_codegen(cpu: str, features: str, triple: str, make_machine: Callable[..., Any]) -> Any:
    """Return a code generator that links modules and leaves them unoptimised.

    Args:
        cpu: LLVM's name of the processor.
        features: LLVM's list of its features.
        triple: The system that is compiled for; empty if this process runs on it.
        make_machine: Makes the target machine of another system, by keyword.
    """
    of = pieces()

    class Library(of.aot_library):  # type: ignore[misc,name-defined]
        """A library that links only: optimisation happens once, on the final module."""

        def _optimize_functions(self, ll_module: Any) -> None:
            """Skip numba's passes over single functions."""

        def _optimize_final_module(self) -> None:
            """Skip numba's passes over the module."""

    class Codegen(of.aot_codegen):  # type: ignore[misc,name-defined]
        """Numba's code generator with the target of one instruction set."""

        _library_class = Library

        def _init(self, llvm_module: Any) -> None:
            """Make a target machine; for another system nothing that would run its code."""
            numbas: Any = super()
            if not triple:
                numbas._init(llvm_module)
                return
            options: dict[str, Any] = {}
            self._tm_features = features
            self._customize_tm_options(options)
            self._tm = make_machine(**options)
            self._target_data = self._tm.target_data
            self._data_layout = str(self._target_data)
            self._loopvect, self._opt_level = False, 0

        def _create_empty_module(self, name: str) -> Any:
            numbas: Any = super()
            module: Any = numbas._create_empty_module(name)
            if triple:
                module.triple = triple
            return module

        def _customize_tm_features(self) -> str:
            return features

        def _customize_tm_options(self, options: dict[str, Any]) -> None:
            machine = {"reloc": "pic", "codemodel": "default", "opt": 3}
            options.update(cpu=cpu, features=features, **machine)

    return Codegen("subgraph")


def make_context(codegen: Any) -> Any:
    """Return numba's context of a code generator."""
    return pieces().cpu.target_context.subtarget(_internal_codegen=codegen)


def refresh(context: Any) -> None:
    """Let numba find what was registered since."""
    cpu = pieces().cpu
    cpu.typing_context.refresh()
    cpu.target_context.refresh()
    context.refresh()


def typed_and_lowered(function: Any, symbol: str, context: Any, fastmath: Iterable[str]) -> Any:
    """Return numba's result for a kernel, its unoptimised module in a library of its own."""
    of = pieces()
    flags = of.compiler.Flags()
    flags.nrt = False
    flags.error_model = "numpy"
    flags.release_gil = True
    flags.boundscheck = False
    flags.no_cpython_wrapper = True
    flags.no_cfunc_wrapper = True
    flags.no_compile = True
    if wanted := set(fastmath):
        flags.fastmath = of.fast_math(wanted)
    return of.compiler.compile_extra(
        of.cpu.typing_context,
        context,
        function,
        (types.int64,) * 4,
        types.none,
        flags,
        {},
        library=context.codegen().create_library(f"{symbol}.body"),
    )


@contextmanager
def helpers_as_written(values: tuple[type, ...]) -> Generator[None]:
    """Let numba leave the functions that a kernel calls as they are: ours are optimised once.

    Its own passes over each of them, whose result is inlined and optimised again, take a third of
    the time and unroll loops twice; machine code of each alone, with all that it calls, is never
    run. The collector would look at all that a compilation makes, too.

    Args:
        values: Numba's types of values for which it may remember how a call is resolved.
    """
    of = pieces()
    seen: list[tuple[Any, Any]] = []
    resolve = of.context.resolve_function_type
    stand_ins: list[tuple[type, str, Any]] = [
        (of.library, "_optimize_functions", _nothing),
        (of.library, "_optimize_final_module", _nothing),
        (of.library, "_finalize_specific", _nothing),
        (of.library, "get_pointer_to_function", _nowhere),
        (of.codegen, "_add_module", _nothing),
        (of.codegen, "set_env", _nothing),
        (of.dispatcher, "add_overload", _adding(of.dispatcher.add_overload, seen)),
        (of.helpers, "_customize_flags", _without_wrappers),
        (of.context, "resolve_function_type", _remembering(resolve, values)),
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
    of = pieces()
    with _replaced(
        [
            (of.builder, "define_nopython_pipeline", staticmethod(_pipeline)),
            (of.helpers, "_compile_cached", _compiled_now),
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


def _pipeline(_state: Any, name: str = "nopython") -> Any:
    of = pieces()
    manager = of.manager(name)
    for step in of.passes:
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


def _adding(
    add: Callable[[Any, Any], None], seen: list[tuple[Any, Any]]
) -> Callable[[Any, Any], None]:
    """Return what adds a compiled helper to its dispatcher, and notes those that Python sees.

    Python could not call the result: there is no machine code.
    """

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


def _remembering(resolve: Callable[..., Any], values: tuple[type, ...]) -> Callable[..., Any]:
    """Return numba's resolution of a call, which remembers what it said of numbers.

    Types are inferred in rounds, and each asks what ``int64 + int64`` is of every addition, down to
    NumPy's rules for arrays: most of the time of a kernel of plain arithmetic.
    """
    known: dict[Any, Any] = {}

    def resolved(context: Any, function: Any, args: Any, kws: Any) -> Any:
        plain = not kws and isinstance(function, types.Function)
        if not plain or not all(isinstance(arg, values) for arg in args):
            return resolve(context, function, args, kws)
        key = (function, *args)
        if key not in known:
            known[key] = resolve(context, function, args, kws)
        return known[key]

    return resolved

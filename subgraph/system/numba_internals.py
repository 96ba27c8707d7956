"""Private interfaces of numba; no other module imports them.

The first part re-exports what custom types and operators need (`AttributeTemplate`, `cgutils`). The
second part runs parts of numba's compiler. A kernel is called by compiled code, computes with
numbers and vectors, and is optimised once, as a whole, by a target machine of Subgraph's; omitting
the other steps makes numba's frontend twice as fast. If numba lacks one of these interfaces,
`pieces` raises `MissingInterface`, and `subgraph.engine.toolchain.compiler` uses the public ones.
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
    """This version of numba lacks a private interface."""


# The passes of a kernel's compilation, in order. Numba's own pipeline has more, for closures within
# a kernel, `with`, literal_unroll and array expressions.
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
    """Return the classes and objects of numba's compiler that this module uses.

    Raises:
        MissingInterface: this version of numba lacks one of them.
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
            helpers=vars(dispatcher)["_FunctionCompiler"],  # compiles functions that kernels call
            context=BaseContext,
            passes=[vars(untyped_passes)[name] for name in _UNTYPED]
            + [vars(typed_passes)[name] for name in _TYPED],
        )
        for kind, name in _REPLACED:
            getattr(vars(found)[kind], name)
    except (ImportError, AttributeError, KeyError) as error:
        raise MissingInterface(f"{type(error).__name__}: {error}") from error
    return found


# The attributes that `unoptimized_helpers` and `minimal_pipeline` replace temporarily.
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
        features: LLVM's feature string.
        triple: LLVM's triple of the target; "" if this process runs on it.
        make_machine: Returns the target machine of another system; takes llvmlite's options of
            target machines as keywords.
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
            """Make the target machine; for another system no execution engine."""
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
    """Return numba's target context of a code generator."""
    return pieces().cpu.target_context.subtarget(_internal_codegen=codegen)


def refresh(context: Any) -> None:
    """Make numba find types and operators that were registered since the last call."""
    cpu = pieces().cpu
    cpu.typing_context.refresh()
    cpu.target_context.refresh()
    context.refresh()


def type_and_lower(function: Any, symbol: str, context: Any, fastmath: Iterable[str]) -> Any:
    """Type and lower a kernel; return numba's CompileResult, with the unoptimised module.

    Args:
        function: The kernel, of four int64 arguments and no result.
        symbol: Name of the kernel in machine code.
        context: Target context of `make_context`.
        fastmath: LLVM's fast-math flags.
    """
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
def unoptimized_helpers(values: tuple[type, ...]) -> Generator[None]:
    """Make numba compile the functions that a kernel calls without optimisation or machine code.

    They are inlined into the kernel, which is optimised once. Numba's optimisation of each of them
    takes a third of the time and unrolls loops twice, and their own machine code is never run. The
    garbage collector is disabled, as a compilation makes many objects and little garbage.

    Args:
        values: Numba's types for whose values the resolution of calls is cached.
    """
    of = pieces()
    seen: list[tuple[Any, Any]] = []
    resolve = of.context.resolve_function_type
    stand_ins: list[tuple[type, str, Any]] = [
        (of.library, "_optimize_functions", _no_operation),
        (of.library, "_optimize_final_module", _no_operation),
        (of.library, "_finalize_specific", _no_operation),
        (of.library, "get_pointer_to_function", _null_address),
        (of.codegen, "_add_module", _no_operation),
        (of.codegen, "set_env", _no_operation),
        (of.dispatcher, "add_overload", _recording_overloads(of.dispatcher.add_overload, seen)),
        (of.helpers, "_customize_flags", _without_wrappers),
        (of.context, "resolve_function_type", _cached_resolution(resolve, values)),
    ]
    was_on = gc.isenabled()
    gc.disable()
    try:
        with _replaced(stand_ins):
            yield
    finally:
        _remove_overloads(seen)
        if was_on:
            gc.enable()


@contextmanager
def minimal_pipeline() -> Generator[None]:
    """Make numba run only the passes that Subgraph's kernels need.

    A kernel that fails so must be compiled again with all passes; helpers do not cache a failure.
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
    """Replace attributes of classes, given as (class, name, value), until the block ends."""
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
    """Replace the compilation of a helper by one that does not cache errors."""
    return True, compiler._compile_core(args, return_type)


def _no_operation(*_arguments: Any) -> None:
    """Replace a step of numba's that is omitted."""


def _null_address(_library: Any, _name: str) -> int:
    """Replace the lookup of a helper's address, which is never called."""
    return 0


def _without_wrappers(_compiler: Any, flags: Any) -> Any:
    """Replace the flags of a helper by those without wrappers for Python and C."""
    flags.no_cpython_wrapper = True
    flags.no_cfunc_wrapper = True
    return flags


def _recording_overloads(
    add: Callable[[Any, Any], None], seen: list[tuple[Any, Any]]
) -> Callable[[Any, Any], None]:
    """Return a replacement of ``Dispatcher.add_overload`` that records helpers visible to Python.

    They have no machine code: `_remove_overloads` must remove them before Python calls them.
    """

    def added(owner: Any, result: Any) -> None:
        if owner.targetoptions.get("no_cpython_wrapper"):  # of `overload`, `register_jitable`
            add(owner, result)
        else:
            owner.overloads[tuple(result.signature.args)] = result
            seen.append((owner, result))

    return added


def _remove_overloads(seen: list[tuple[Any, Any]]) -> None:
    """Remove the recorded overloads, so that a call from Python compiles the function again."""
    for owner, result in seen:
        owner.targetctx.remove_user_function(result.entry_point)
        del owner.overloads[tuple(result.signature.args)]


def _cached_resolution(resolve: Callable[..., Any], values: tuple[type, ...]) -> Callable[..., Any]:
    """Return numba's resolution of a call with a cache for arguments of plain types.

    Type inference iterates, and resolves every ``int64 + int64`` again in each round, including
    NumPy's rules for arrays: most of the compilation time of arithmetic kernels.
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

"""From a kernel factory to object code, with numba; imported only when something must be compiled.

Numba's frontend types and lowers the kernel; its modules are linked without numba's own passes and
optimised once, by our target machine for the instruction set in force.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable
from functools import cache
from typing import Any

import llvmlite.binding as ll
from llvmlite import ir
from numba import types
from numba.core import compiler as numba_compiler
from numba.core.codegen import AOTCodeLibrary, AOTCPUCodegen
from numba.core.compiler_lock import global_compiler_lock
from numba.core.cpu_options import FastMathOptions
from numba.core.registry import cpu_target

from subgraph.engine.codegen.irtools import align_stack
from subgraph.engine.toolchain import frontend, targets
from subgraph.system.host import Isa

_LOG = logging.getLogger("subgraph.engine")
_WORD = ir.IntType(64)
_ARGUMENTS = (types.int64,) * 4


class _Library(AOTCodeLibrary):
    """A numba code library that links only: optimisation happens once, on the final module."""

    def _optimize_functions(self, ll_module: Any) -> None:
        """Skip numba's passes over single functions."""

    def _optimize_final_module(self) -> None:
        """Skip numba's passes over the module."""


class _Codegen(AOTCPUCodegen):
    """Numba's code generator with the target of one instruction set."""

    _library_class = _Library

    def __init__(self, isa: Isa) -> None:
        self._isa = isa
        self._triple = targets.triple()
        ll.initialize_native_asmparser()  # without it LLVM aborts at inline assembly
        super().__init__("subgraph")

    def _init(self, llvm_module: Any) -> None:
        """Make a target machine; for another architecture nothing that would run its code."""
        if not self._triple:
            super()._init(llvm_module)
            return
        self._tm_features = self._customize_tm_features()
        options: dict[str, Any] = {}
        self._customize_tm_options(options)
        self._tm = targets.target().create_target_machine(**options)
        self._target_data = self._tm.target_data
        self._data_layout = str(self._target_data)
        self._loopvect, self._opt_level = False, 0

    def _create_empty_module(self, name: str) -> Any:
        module = super()._create_empty_module(name)
        if self._triple:
            module.triple = self._triple
        return module

    def _customize_tm_features(self) -> str:
        return self._isa.features

    def _customize_tm_options(self, options: dict[str, Any]) -> None:
        options.update(
            cpu=self._isa.cpu,
            features=self._isa.features,
            reloc="pic",
            codemodel="default",
            opt=3,
        )

    @property
    def target_machine(self) -> Any:
        return self._tm


@cache
def _context(isa: Isa) -> Any:
    return cpu_target.target_context.subtarget(_internal_codegen=_Codegen(isa))


def _flags(fastmath: Iterable[str]) -> Any:
    flags = numba_compiler.Flags()
    flags.nrt = False
    flags.error_model = "numpy"
    flags.release_gil = True
    flags.boundscheck = False
    flags.no_cpython_wrapper = True
    flags.no_cfunc_wrapper = True
    flags.no_compile = True
    if wanted := set(fastmath):
        flags.fastmath = FastMathOptions(wanted)
    return flags


def make_function(module: str, factory: str, variant: dict[str, Any]) -> Any:
    """Import a kernel module, call its factory and return the plain Python kernel."""
    return getattr(importlib.import_module(module), factory)(**variant)


@global_compiler_lock
def _lower(function: Any, symbol: str, isa: Isa) -> Any:
    """Return the linked, unoptimised LLVM module with the kernel under its C name."""
    context = _context(isa)
    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()
    context.refresh()
    with frontend.helpers_as_written():
        try:
            with frontend.few_passes():
                result = _typed_and_lowered(function, symbol, context)
        except Exception as error:  # it may need more of numba than our own kernels do
            _LOG.debug("%s is compiled with all of numba: %s", function.__qualname__, error)
            result = _typed_and_lowered(function, symbol, context)
    library = context.codegen().create_library(symbol)
    module = library.create_ir_module(symbol)
    fnty = ir.FunctionType(ir.VoidType(), [_WORD] * 4)
    wrapper = ir.Function(module, fnty, symbol)
    align_stack(wrapper)
    builder = ir.IRBuilder(wrapper.append_basic_block("entry"))
    fndesc = result.fndesc
    inner = context.declare_function(module, fndesc)
    context.call_conv.call_function(builder, inner, fndesc.restype, fndesc.argtypes, wrapper.args)
    builder.ret_void()
    library.add_ir_module(module)
    library.add_linking_library(result.library)
    library.finalize()
    return library._final_module


def _typed_and_lowered(function: Any, symbol: str, context: Any) -> Any:
    """Return numba's result for a kernel, its unoptimised module in a library of its own."""
    return numba_compiler.compile_extra(
        cpu_target.typing_context,
        context,
        function,
        _ARGUMENTS,
        types.none,
        _flags(getattr(function, "fastmath", ())),
        {},
        library=context.codegen().create_library(f"{symbol}.body"),
    )


def compile_object(function: Any, symbol: str, isa: Isa) -> bytes:
    """Compile a kernel to object code.

    Args:
        function: A Python function of four int64, no result; its attribute ``fastmath`` (a set of
            LLVM flags such as ``{"contract"}``) allows that much freedom in plain float arithmetic.
        symbol: Name of the C function in the object.
        isa: What to compile for.

    Returns:
        A relocatable object file that defines ``symbol``.

    Raises:
        Exception: Whatever numba raises about the kernel's source.
    """
    module = _optimised(function, symbol, isa)
    return bytes(_context(isa).codegen().target_machine.emit_object(module))


def object_and_assembly(function: Any, symbol: str, isa: Isa) -> tuple[bytes, str]:
    """Return the object code of a kernel and its assembly, to look at; for any processor."""
    module = _optimised(function, symbol, isa)
    machine = _context(isa).codegen().target_machine
    return bytes(machine.emit_object(module)), str(machine.emit_assembly(module))


def _optimised(function: Any, symbol: str, isa: Isa) -> Any:
    module = _lower(function, symbol, isa)
    for item in (*module.functions, *module.global_variables):
        if not item.is_declaration and item.name != symbol:
            item.linkage = "internal"
    tuning = ll.create_pipeline_tuning_options(3)
    tuning.loop_vectorization = True
    tuning.slp_vectorization = True
    machine = _context(isa).codegen().target_machine
    passes = ll.create_pass_builder(machine, tuning)
    passes.getModulePassManager().run(module, passes)
    return module

"""From a kernel factory to object code, with numba; imported only when something must be compiled.

Numba's frontend types and lowers the kernel; its modules are linked without numba's own passes and
optimised once, by our target machine for the instruction set in force. That takes interfaces which
numba does not document (`subgraph.system.numba_internals`). Where they are missing, numba compiles
the kernel as any function for C, which takes longer, and its result is optimised again.
"""

from __future__ import annotations

import importlib
import logging
from functools import cache
from typing import Any

import llvmlite.binding as ll
from llvmlite import ir
from numba import cfunc, types

from subgraph.engine.codegen.argument_views import ArgumentsView
from subgraph.engine.codegen.irtools import VecType, align_stack
from subgraph.engine.toolchain import targets
from subgraph.errors import DeviceError
from subgraph.system import numba_internals as internals
from subgraph.system.host import Isa

_LOG = logging.getLogger("subgraph.engine")
_WORD = ir.IntType(64)
_VALUES = (types.Number, types.Boolean, VecType, ArgumentsView)


@cache
def _context(isa: Isa) -> Any:
    ll.initialize_native_asmparser()  # without it LLVM aborts at inline assembly
    triple = targets.triple()
    codegen = internals.make_codegen(isa.cpu, isa.features, triple, _make_machine)
    return internals.make_context(codegen)


def _make_machine(**options: Any) -> Any:
    return targets.target().create_target_machine(**options)


@cache
def _machine(isa: Isa) -> Any:
    """Return the target machine that optimises for an instruction set and emits its code."""
    return _make_machine(
        cpu=isa.cpu, features=isa.features, reloc="pic", codemodel="default", opt=3
    )


def make_function(module: str, factory: str, variant: dict[str, Any]) -> Any:
    """Import a kernel module, call its factory and return the plain Python kernel."""
    return getattr(importlib.import_module(module), factory)(**variant)


def _lower(function: Any, symbol: str, isa: Isa) -> Any:
    """Return the linked, unoptimised LLVM module with the kernel under its C name.

    Raises:
        MissingInterface: Numba lacks an interface that this takes.
    """
    with internals.pieces().lock:
        context = _context(isa)
        internals.refresh(context)
        fastmath = getattr(function, "fastmath", ())
        with internals.helpers_as_written(_VALUES):
            try:
                with internals.few_passes():
                    result = internals.typed_and_lowered(function, symbol, context, fastmath)
            except Exception as error:  # it may need more of numba than our own kernels do
                name = function.__qualname__
                _LOG.debug("%s is compiled with all of numba: %s", name, error)
                result = internals.typed_and_lowered(function, symbol, context, fastmath)
        library = context.codegen().create_library(symbol)
        module = library.create_ir_module(symbol)
        wrapper, builder = _start_wrapper(module, symbol)
        fndesc = result.fndesc
        inner = context.declare_function(module, fndesc)
        convention = context.call_conv
        convention.call_function(builder, inner, fndesc.restype, fndesc.argtypes, wrapper.args)
        builder.ret_void()
        library.add_ir_module(module)
        library.add_linking_library(result.library)
        library.finalize()
        return library._final_module


def _start_wrapper(module: Any, symbol: str) -> tuple[Any, Any]:
    """Begin the C function that calls a kernel; return it and the builder of its only block."""
    wrapper = ir.Function(module, ir.FunctionType(ir.VoidType(), [_WORD] * 4), symbol)
    align_stack(wrapper)
    return wrapper, ir.IRBuilder(wrapper.append_basic_block("entry"))


def _lower_plainly(function: Any, symbol: str) -> Any:
    """Return the LLVM module of a kernel by numba's public interface alone.

    Raises:
        DeviceError: The code is for another processor than this one, for which numba cannot
            compile, or numba's way to call functions is not known.
    """
    if targets.triple():
        raise DeviceError(
            "this version of numba compiles for the processor at hand only; install one that "
            "setup.cfg names to compile for others"
        )
    signature = types.void(*[types.int64] * 4)
    fastmath = set(getattr(function, "fastmath", ()))
    options: dict[str, Any] = {"fastmath": fastmath} if fastmath else {}
    made = cfunc(signature, error_model="numpy", boundscheck=False, **options)(function)
    module = ll.parse_assembly(made.inspect_llvm())
    # The function for C asks for Python's lock to report errors; ours calls what is behind it,
    # with places for a result and for an error before the arguments.
    name = made.native_name.removeprefix("cfunc.")
    places = [each for each in module.functions if each.name == name]
    if len(places) != 1 or len(list(places[0].arguments)) != 2 + len(signature.args):
        raise DeviceError(
            "this version of numba calls functions in a way that is not known; install one that "
            "setup.cfg names"
        )
    caller = ir.Module()
    wrapper, builder = _start_wrapper(caller, symbol)
    result, error = (builder.alloca(ir.IntType(8).as_pointer()) for _ in range(2))
    kinds = [result.type, error.type, *[_WORD] * 4]
    inner = ir.Function(caller, ir.FunctionType(ir.IntType(32), kinds), name)
    builder.call(inner, [result, error, *wrapper.args])
    builder.ret_void()
    caller.triple, caller.data_layout = module.triple, module.data_layout
    module.link_in(ll.parse_assembly(str(caller)))
    return module


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
    return bytes(_machine(isa).emit_object(module))


def object_and_assembly(function: Any, symbol: str, isa: Isa) -> tuple[bytes, str]:
    """Return the object code of a kernel and its assembly, to look at; for any processor."""
    module = _optimised(function, symbol, isa)
    machine = _machine(isa)
    return bytes(machine.emit_object(module)), str(machine.emit_assembly(module))


def _optimised(function: Any, symbol: str, isa: Isa) -> Any:
    try:
        module = _lower(function, symbol, isa)
    except internals.MissingInterface as error:
        _LOG.warning("numba is used by its public interface, which takes longer: %s", error)
        module = _lower_plainly(function, symbol)
    for item in (*module.functions, *module.global_variables):
        if not item.is_declaration and item.name != symbol:
            item.linkage = "internal"
    tuning = ll.create_pipeline_tuning_options(3)
    tuning.loop_vectorization = True
    tuning.slp_vectorization = True
    machine = _machine(isa)
    passes = ll.create_pass_builder(machine, tuning)
    passes.getModulePassManager().run(module, passes)
    return module

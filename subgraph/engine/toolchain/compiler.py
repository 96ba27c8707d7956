"""The compiler: a kernel's Python function or LLVM assembly to object code, by numba and LLVM.

1. Numba's frontend infers types and lowers the function, and each function that it calls, to LLVM
   IR (`_lower`).
2. A wrapper with the kernel's C signature is added, and all modules are linked into one.
3. LLVM's -O3 pipeline runs once over that module, for the target machine of one `Isa`
   (`_optimised`), and emits an object file.

Numba by itself would optimise every function alone and then again after linking. To leave that out
takes interfaces that numba does not document (`subgraph.system.numba_internals`). If this version
of numba lacks one, step 1 is numba's public ``cfunc`` (`_lower_by_cfunc`), whose optimised result
passes through step 3 once more: slower to compile, and for this machine's architecture only.

This module imports numba; it is itself imported only when a kernel must be compiled.
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
# Numba's types of the values in kernels; for calls with these alone numba's answers are memoised.
_VALUES = (types.Number, types.Boolean, VecType, ArgumentsView)


@cache
def _context(isa: Isa) -> Any:
    """Return numba's target context that lowers code for an instruction set."""
    ll.initialize_native_asmparser()  # without it LLVM aborts at inline assembly
    triple = targets.triple()
    codegen = internals.make_codegen(isa.cpu, isa.features, triple, _make_machine)
    return internals.make_context(codegen)


def _make_machine(**options: Any) -> Any:
    """Return an LLVM target machine for the architecture in force."""
    return targets.target().create_target_machine(**options)


@cache
def _machine(isa: Isa) -> Any:
    """Return the target machine that optimises for an instruction set and emits its code.

    Its code is position independent, as `objectfile` places it at any address.
    """
    return _make_machine(
        cpu=isa.cpu, features=isa.features, reloc="pic", codemodel="default", opt=3
    )


def make_function(module: str, factory: str, variant: dict[str, Any]) -> Any:
    """Import a kernel module and return the function that its factory makes (`Kernel`).

    Args:
        module: Full dotted name of the module.
        factory: Name of the factory function in it.
        variant: Keyword arguments of the factory.
    """
    return getattr(importlib.import_module(module), factory)(**variant)


def _lower(function: Any, symbol: str, isa: Isa) -> Any:
    """Return the linked, unoptimised LLVM module that defines ``symbol`` as the kernel's function.

    Raises:
        MissingInterface: This version of numba lacks an interface that is used here.
    """
    with internals.pieces().lock:
        context = _context(isa)
        internals.refresh(context)
        fastmath = getattr(function, "fastmath", ())
        with internals.unoptimized_helpers(_VALUES):
            try:
                with internals.minimal_pipeline():
                    result = internals.type_and_lower(function, symbol, context, fastmath)
            except Exception as error:
                # Kernels of others may need passes that `minimal_pipeline` leaves out.
                name = function.__qualname__
                _LOG.debug("%s is compiled with all of numba: %s", name, error)
                result = internals.type_and_lower(function, symbol, context, fastmath)
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
    """Declare ``void symbol(int64, int64, int64, int64)``; return it and a builder in its body."""
    wrapper = ir.Function(module, ir.FunctionType(ir.VoidType(), [_WORD] * 4), symbol)
    align_stack(wrapper)
    return wrapper, ir.IRBuilder(wrapper.append_basic_block("entry"))


def _lower_by_cfunc(function: Any, symbol: str) -> Any:
    """Return the LLVM module that defines ``symbol``, made by numba's public interface alone.

    Raises:
        DeviceError: The code is for another architecture than this machine's, or the compiled
            function does not have the signature that is expected of numba.
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
    # Numba's C function takes Python's lock to report errors. The wrapper calls the function that
    # it wraps, by numba's calling convention: status(result *, error **, arguments ...).
    name = made.native_name.removeprefix("cfunc.")
    candidates = [each for each in module.functions if each.name == name]
    if len(candidates) != 1 or len(list(candidates[0].arguments)) != 2 + len(signature.args):
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
        function: A Python function of four int64 without a result. Its attribute ``fastmath``, if
            it has one, is the set of LLVM's fast-math flags (such as ``"contract"``) for its
            arithmetic on Python floats; vectors' operations are unaffected. Or LLVM assembly, whose
            ``@entry`` is the function and may have another signature.
        symbol: Name of the C function in the object.
        isa: The instruction set to compile for.

    Returns:
        A relocatable object file that defines ``symbol``.

    Raises:
        Exception: Numba or LLVM rejects the kernel; the type is theirs.
    """
    module = _optimised(function, symbol, isa)
    return bytes(_machine(isa).emit_object(module))


def object_and_assembly(function: Any, symbol: str, isa: Isa) -> tuple[bytes, str]:
    """Return the object code of a kernel and its assembly text, for inspection and tests.

    Args:
        function: As in `compile_object`.
        symbol: Name of the C function in the object.
        isa: The instruction set; this machine need not have it.
    """
    module = _optimised(function, symbol, isa)
    machine = _machine(isa)
    return bytes(machine.emit_object(module)), str(machine.emit_assembly(module))


def _optimised(function: Any, symbol: str, isa: Isa) -> Any:
    """Return the optimised LLVM module of a kernel, in which only ``symbol`` is external."""
    if isinstance(function, str):
        module = ll.parse_assembly(function.replace("@entry", f"@{symbol}"))
    else:
        try:
            module = _lower(function, symbol, isa)
        except internals.MissingInterface as error:
            _LOG.warning("numba is used by its public interface, which takes longer: %s", error)
            module = _lower_by_cfunc(function, symbol)
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

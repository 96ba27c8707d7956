"""The functions of the search as machine code; imported only where numba compiles them.

Numba gets a type for each structure: the address of a part of a block of 64-bit words. The part has
for each field in order the address of a table, the value of a counter, or the words of a nested
structure. The functions' code objects are compiled unchanged; their globals refer to the compiled
forms of the functions that they call.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import (
    infer_getattr,
    intrinsic,
    lower_builtin,
    lower_getattr_generic,
    lower_setattr_generic,
    models,
    register_model,
)

from subgraph.partition.search import (
    block_growth,
    blocks,
    contraction,
    frontier,
    hetero,
    operations,
    region_growth,
    sorting,
)
from subgraph.partition.search.structures import SearchState, field_kinds, leaves
from subgraph.system.numba_internals import (
    AbstractTemplate,
    AttributeTemplate,
    infer_global,
    signature,
)

# Without wrappers for Python a helper compiles in two thirds of the time.
_helper = njit(
    nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, _nrt=False
)
_MODULES = (
    *(sorting, contraction, blocks, block_growth, hetero),
    *(frontier, region_growth, operations),
)
_WORD, _ENTRY = ir.IntType(64), ir.IntType(32)


class StructureType(types.Type):
    """Numba's type of a structure of the search: the address of its words."""

    def __init__(self, structure: type) -> None:
        """Lay out the fields of ``structure``."""
        super().__init__(structure.__name__)
        self.kinds = field_kinds(structure)
        sizes = {name: _words(kind) for name, kind in self.kinds.items()}
        ends = np.cumsum(list(sizes.values())).tolist()
        self.offsets = {
            name: 8 * (end - size) for (name, size), end in zip(sizes.items(), ends, strict=True)
        }


def _words(kind: str | type) -> int:
    return 1 if isinstance(kind, str) else sum(1 for _ in leaves(kind))


class TableType(types.Type):
    """Numba's type of one table: the address of its entries, which are int32."""

    def __init__(self) -> None:
        """Name the type."""
        super().__init__("Table")


_TABLE = TableType()
_structure = cache(StructureType)


@register_model(StructureType)
@register_model(TableType)
class _Address(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, _WORD)


@infer_getattr
class _Fields(AttributeTemplate):
    key = StructureType

    def generic_resolve(self, typ: Any, attr: str) -> Any:
        kind = typ.kinds.get(attr)
        if kind is None or isinstance(kind, type):
            return None if kind is None else _structure(kind)
        return types.int64 if kind == "int" else _TABLE


def _address(builder: Any, typ: Any, block: Any, attr: str) -> Any:
    return builder.add(block, _WORD(typ.offsets[attr]))


@lower_getattr_generic(StructureType)
def _get_field(_context: Any, builder: Any, typ: Any, block: Any, attr: str) -> Any:
    address = _address(builder, typ, block, attr)
    if isinstance(typ.kinds[attr], type):
        return address
    return builder.load(builder.inttoptr(address, ir.PointerType(_WORD)))


@lower_setattr_generic(StructureType)
def _set_field(context: Any, builder: Any, sig: Any, args: Any, attr: str) -> None:
    block, value = args
    typ = sig.args[0]
    if typ.kinds[attr] == "int":
        value = context.cast(builder, value, sig.args[1], types.int64)
    address = _address(builder, typ, block, attr)
    builder.store(value, builder.inttoptr(address, ir.PointerType(_WORD)))


@infer_global(operator.getitem)
class _Get(AbstractTemplate):
    def generic(self, args: Any, kws: Any) -> Any:
        return signature(types.int64, _TABLE, types.int64) if args[0] == _TABLE else None


@infer_global(operator.setitem)
class _Set(AbstractTemplate):
    def generic(self, args: Any, kws: Any) -> Any:
        whole = types.int64
        return signature(types.void, _TABLE, whole, whole) if args[0] == _TABLE else None


def _entry(builder: Any, table: Any, index: Any) -> Any:
    pointer = builder.inttoptr(table, ir.PointerType(_ENTRY))
    return builder.gep(pointer, [index], inbounds=True)


@lower_builtin(operator.getitem, TableType, types.int64)
def _get_entry(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
    return builder.sext(builder.load(_entry(builder, *args)), _WORD)


@lower_builtin(operator.setitem, TableType, types.int64, types.int64)
def _set_entry(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
    table, index, value = args
    builder.store(builder.trunc(value, _ENTRY), _entry(builder, table, index))
    return context.get_dummy_value()


@intrinsic
def _state_at(_context: Any, address: Any) -> Any:
    def emit(_context: Any, _builder: Any, _sig: Any, args: Any) -> Any:
        return args[0]

    return _structure(SearchState)(types.int64), emit


@intrinsic
def _store_result(_context: Any, address: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], ir.PointerType(_WORD)))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


def _compiled(function: Any) -> Any:
    """Return ``function`` as a numba function that calls the search's others as such."""
    scopes: dict[str, dict[str, Any]] = {module.__name__: {} for module in _MODULES}
    made: dict[Any, Any] = {}
    for module in _MODULES:
        scope = scopes[module.__name__]
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ in scopes:
                if value not in made:
                    own = scopes[value.__module__]
                    made[value] = _helper(FunctionType(value.__code__, own, value.__name__))
                scope[name] = made[value]
            else:
                scope[name] = value
    return made[function]


def search(*, result: int, state_at: int) -> Callable[[int, int, int, int], None]:
    """Return the kernel that does one operation.

    Args:
        result: Offset of the word in the block that gets the result.
        state_at: Offset of the words of the search's state.
    """
    execute = _compiled(operations.execute)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        _store_result(args + result, execute(_state_at(args + state_at)))

    return kernel

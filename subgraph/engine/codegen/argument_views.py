"""Views: the fields of an argument block as attributes, inside kernels.

``view_of(Declaration)`` returns a function that makes a view of the address of a block::

    arguments = view_of(RowSumArguments)

    def kernel(args, begin, end, worker):
        a = arguments(args)
        size = a.columns

At run time a view is the block's address. Reading an attribute is one load at a constant offset,
setting one is one store. Functions that kernels call may take views, and a view converts to an
address where one is expected. This module imports numba, so it is imported only to compile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

from numba import types
from numba.extending import (
    infer_getattr,
    lower_cast,
    lower_getattr_generic,
    lower_setattr_generic,
    models,
    register_jitable,
    register_model,
)

from subgraph.engine.codegen.arguments import WordBlock
from subgraph.engine.codegen.irtools import (
    F64,
    I64,
    INT64,
    define,
    load_at,
    store_at,
    zeroed_stack,
)
from subgraph.engine.codegen.simd import ld_i64
from subgraph.system.numba_internals import AttributeTemplate, Conversion

_A = TypeVar("_A", bound=WordBlock)
_WORD = 8  # bytes
_ROUND = 4  # words: blocks on the stack are rounded up to 32 bytes, to be zeroed by few stores
DEPTH, HEIGHT, WIDTH = 0, 1, 2  # axes of a field of kind "Triple", for `along`


class ArgumentsView(types.Type):
    """Numba's type of a view.

    Attributes:
        declaration: The declaration of the block.
    """

    def __init__(self, declaration: type[WordBlock]) -> None:
        self.declaration = declaration
        super().__init__(f"{declaration.__module__}.{declaration.__qualname__}")

    def can_convert_to(self, _context: Any, other: Any) -> Any:
        """Tell numba that a view safely converts to int64, the block's address."""
        return Conversion.safe if other == INT64 else None


@register_model(ArgumentsView)
class _Model(models.PrimitiveModel):
    """Tells numba that a view is represented as an int64."""

    def __init__(self, manager: Any, view: ArgumentsView) -> None:
        super().__init__(manager, view, I64)


@infer_getattr
class _Attributes(AttributeTemplate):
    """Tells numba the types of a view's attributes."""

    key = ArgumentsView

    def generic_resolve(self, view: ArgumentsView, name: str) -> Any:
        """Return the type of an attribute; None, which numba reports, if there is no such field."""
        field = view.declaration.fields.get(name)
        if field is None:
            return None
        return types.float64 if field[1] == "float" else INT64


@lower_getattr_generic(ArgumentsView)
def _read(_context: Any, builder: Any, view: ArgumentsView, block: Any, name: str) -> Any:
    """Emit the value of an attribute: the word itself, or the address of several words."""
    index, kind = view.declaration.fields[name]
    address = builder.add(block, I64(_WORD * index))
    if kind in ("ReportWords", "Triple", "Words"):
        return address
    return load_at(builder, address, F64 if kind == "float" else I64, _WORD)


@lower_setattr_generic(ArgumentsView)
def _write(_context: Any, builder: Any, signature: Any, values: Any, name: str) -> None:
    """Emit the store of an attribute."""
    block, value = values
    index, kind = signature.args[0].declaration.fields[name]
    if kind == "float":
        value = builder.bitcast(value, I64)
    store_at(builder, builder.add(block, I64(_WORD * index)), value, _WORD)


@lower_cast(ArgumentsView, types.Integer)
def _address(_context: Any, _builder: Any, _view: Any, _integer: Any, block: Any) -> Any:
    """Emit the conversion of a view to the block's address."""
    return block


@register_jitable
def along(triple: int, axis: int) -> int:
    """Return an integer of a field of kind "Triple".

    Args:
        triple: The field's value in a view: the address of its three words.
        axis: `DEPTH`, `HEIGHT` or `WIDTH`.
    """
    number: int = ld_i64(triple + _WORD * axis)
    return number


def view_of(declaration: type[_A]) -> Callable[[int], _A]:
    """Return ``(address of a block) -> view`` for kernels."""
    made: Callable[[int], _A] = _maker(cast("Any", declaration))
    return made


def stack_block(declaration: type[_A]) -> Callable[[], _A]:
    """Return ``() -> view`` for kernels, of a block on the stack that each call zeroes."""
    made: Callable[[], _A] = _stack_maker(cast("Any", declaration))
    return made


@cache
def _stack_maker(declaration: Any) -> Any:
    """Return the intrinsic behind `stack_block`."""
    words = -(-declaration.block_words // _ROUND) * _ROUND
    return define(ArgumentsView(declaration), [], lambda b, c, a: zeroed_stack(b, words))


@cache
def _maker(declaration: Any) -> Any:
    """Return the intrinsic behind `view_of`, which emits no instruction."""
    return define(ArgumentsView(declaration), [INT64], lambda b, c, a: a[0])

"""Matrix products: shape rules."""

from __future__ import annotations

from subgraph.errors import ShapeError
from subgraph.graph import Node
from subgraph.op import shape_rule
from subgraph.types import Dim, TensorType, ValueType

from .elementwise import Types, Values, same_dtype, tensor
from .strides import broadcast_shapes


def _fits(a: Dim, b: Dim) -> None:
    if isinstance(a, int) and isinstance(b, int) and a != b:
        raise ShapeError(f"{a} columns do not meet {b} rows")


@shape_rule("MatMul")
def matmul(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Multiply the last two dimensions and broadcast the others, as NumPy does."""
    return [_product(same_dtype(types), types[0], types[1])]


@shape_rule("MatMulInteger")
def matmul_integer(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """As MatMul, of bytes: with sums of 32 bits."""
    return [_product("int32", types[0], types[1])]


@shape_rule("QLinearMatMul")
def qlinear_matmul(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """As MatMul; the dtype is that of the result's zero point."""
    zero = tensor(types[7])
    return [None if zero is None else _product(zero.dtype, types[0], types[3])]


def _product(
    dtype: str | None, left: ValueType | None, right: ValueType | None
) -> ValueType | None:
    a, b = tensor(left), tensor(right)
    if dtype is None or a is None or b is None or a.shape is None or b.shape is None:
        return None if dtype is None else TensorType(dtype)
    if not a.shape or not b.shape:
        raise ShapeError("a matrix product of a scalar")
    tall = a.shape if len(a.shape) > 1 else (1, *a.shape)
    wide = b.shape if len(b.shape) > 1 else (*b.shape, 1)
    _fits(tall[-1], wide[-2])
    lead = broadcast_shapes([tall[:-2], wide[:-2]])
    rows = tall[-2:-1] if len(a.shape) > 1 else ()
    columns = wide[-1:] if len(b.shape) > 1 else ()
    return TensorType(dtype, (*(lead or ()), *rows, *columns))


@shape_rule("Gemm")
def gemm(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Multiply two matrices, each perhaps turned."""
    dtype = same_dtype([kind for kind in types if kind is not None])
    a, b = tensor(types[0]), tensor(types[1])
    if a is None or b is None or a.shape is None or b.shape is None:
        return [None if dtype is None else TensorType(dtype)]
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise ShapeError(f"Gemm needs matrices, got ranks {len(a.shape)} and {len(b.shape)}")
    left = a.shape[::-1] if node.attrs.get("transA", 0) else a.shape
    right = b.shape[::-1] if node.attrs.get("transB", 0) else b.shape
    _fits(left[1], right[0])
    return [TensorType(a.dtype, (left[0], right[1]))]

"""What bodies of ONNX Runtime's operators require of their nodes, beyond the standard's operators.

The standard's Add, Mul, DequantizeLinear and Attention broadcast, and take scales along an axis,
where ONNX Runtime's operators do not. A body names one of these with ``requires=``, so that every
device checks it with the sizes at hand.
"""

from __future__ import annotations

from subgraph.graph.graph import Node
from subgraph.operators.operator import declare
from subgraph.operators.requirements import (
    Tensor,
    require,
    require_broadcast,
    require_dtype,
    require_shape,
)


def one_row(node: Node, x: Tensor, row: Tensor) -> None:
    """Raise ShapeError unless the second operand is a vector as long as a row of the first."""
    require(x.rank >= 1, "a bias is added to a scalar")
    require_shape("the bias", row, x.shape[-1:], "one for each element of a row")


def factors_of_rows(node: Node, x: Tensor, *factors: Tensor | None) -> None:
    """Raise ShapeError unless each factor is a vector as long as a row of the first operand."""
    require(x.rank >= 1, "a scalar has no rows")
    for factor in factors:
        require_shape("a factor", factor, x.shape[-1:], "one for each element of a row")


def same_shape(node: Node, x: Tensor, other: Tensor) -> None:
    """Raise ShapeError unless both operands have one shape."""
    require_shape("the second operand", other, x.shape, "that of the first")


def same_rows(node: Node, x: Tensor, other: Tensor) -> None:
    """Raise ShapeError unless the second operand ends in matrices of the first's sizes."""
    require_broadcast("the second operand", other, x.shape, "the first's shape")
    require(
        other.rank >= 2
        and all(a == b for a, b in zip(other.shape[-2:], x.shape[-2:], strict=True)),
        "the second operand has shape {}, the first {}; their last two sizes must be equal",
        list(other.shape),
        list(x.shape),
    )


def into_first(node: Node, x: Tensor, other: Tensor) -> None:
    """Raise ShapeError unless the second operand broadcasts to the first, which keeps its shape."""
    require_broadcast("the second operand", other, x.shape, "the first's shape")


def one_scale(node: Node, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> None:
    """Raise ShapeError unless there is one scale and one zero point for the whole tensor."""
    for name, given in (("the scale", scale), ("the zero point", zero)):
        if given is not None:
            require(
                given.rank <= 1 and all(size == 1 for size in given.shape),
                "{} has shape {}; it must hold one number",
                name,
                list(given.shape),
            )
    if node.op_type == "DequantizeLinear":
        require_dtype("the zero point", zero, x.dtype)


def all_keys(node: Node, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | None) -> None:
    """Raise ShapeError unless the mask of an Attention knows all keys, of now and before."""
    if not rest or rest[0] is None:
        return
    mask, past = rest[0], rest[1] if len(rest) > 1 else None
    keys = k.shape[-2] if past is None else past.shape[-2] + k.shape[-2]
    require(
        mask.rank >= 1 and mask.shape[-1] == keys,
        "a mask or bias of shape {} for {} keys",
        list(mask.shape),
        keys,
    )


def all_batches(node: Node, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | None) -> None:
    """Raise ShapeError unless the mask of an Attention knows all keys of each batch."""
    all_keys(node, q, k, v, *rest)
    mask = rest[0] if rest else None
    require(
        mask is not None and mask.rank == 4 and mask.shape[0] == q.shape[0],
        "a mask of shape {} for {} batches",
        None if mask is None else list(mask.shape),
        q.shape[0],
    )


declare("all_batches", domain="body", requires=all_batches)
declare("all_keys", domain="body", requires=all_keys)
declare("into_first", domain="body", requires=into_first)
declare("one_row", domain="body", requires=one_row)
declare("one_scale", domain="body", requires=one_scale)
declare("factors_of_rows", domain="body", requires=factors_of_rows)
declare("same_rows", domain="body", requires=same_rows)
declare("same_shape", domain="body", requires=same_shape)

"""Additional requirements of nodes in the bodies of ONNX Runtime's operators.

The standard's Add, Mul, DequantizeLinear and Attention broadcast, and accept scales along an axis,
where ONNX Runtime's operators do not. A body names one of these with ``requires=``, so that every
device checks it with concrete sizes.
"""

from __future__ import annotations

from subgraph.graph.graph import Node
from subgraph.operators.operator import declare
from subgraph.operators.requirements import (
    Tensor,
    known_numbers,
    require,
    require_broadcast,
    require_dtype,
    require_shape,
)


def one_row(node: Node, x: Tensor, row: Tensor) -> None:
    """Raise ShapeError unless the second operand is a vector as long as a row of the first.

    Args:
        node: A node of a body.
        x: The first operand, rows along the last dimension.
        row: The second.
    """
    require(x.rank >= 1, "a bias is added to a scalar")
    require_shape("the bias", row, x.shape[-1:], "one for each element of a row")


def factors_of_rows(node: Node, x: Tensor, *factors: Tensor | None) -> None:
    """Raise ShapeError unless each factor is a vector as long as a row of the first operand."""
    require(x.rank >= 1, "a scalar has no rows")
    for factor in factors:
        require_shape("a factor", factor, x.shape[-1:], "one for each element of a row")


def first_is_zero(node: Node, ends: Tensor, begins: Tensor) -> None:
    """Raise ShapeError unless the first of several parts, if there is one, begins at 0.

    Args:
        node: A node of a body.
        ends: Index after the last element of each part.
        begins: Index of the first element of each part.
    """
    known = known_numbers(begins)
    require(not known or known[0] == 0, "the first part begins at {}, not at 0", (known or [0])[0])


def no_padding(node: Node, x: Tensor, pads: Tensor, *_: Tensor | None) -> None:
    """Raise ShapeError unless a Pad only removes elements.

    Args:
        node: A Pad of a body.
        x: Its input; not read.
        pads: Elements to add, negative to remove.
    """
    known = known_numbers(pads)
    require(not known or max(known) <= 0, "pads are {}; none may be negative", _negated(known))


def _negated(numbers: list[int] | None) -> list[int]:
    return [-number for number in numbers or ()]


def not_empty(node: Node, start: Tensor, limit: Tensor, step: Tensor) -> None:
    """Raise ShapeError unless a Range that begins at 0 has elements.

    Args:
        node: A Range of a body.
        start: Its first element; not read.
        limit: The end of the range.
        step: The step; not read.
    """
    known = known_numbers(limit)
    require(not known or min(known) >= 1, "a size is {}; it must be at least 1", (known or [1])[0])


def same_shape(node: Node, x: Tensor, other: Tensor) -> None:
    """Raise ShapeError unless both operands have the same shape.

    Args:
        node: A node of a body.
        x: The first operand.
        other: The second.
    """
    require_shape("the second operand", other, x.shape, "that of the first")


def same_rows(node: Node, x: Tensor, other: Tensor) -> None:
    """Raise ShapeError unless the second operand's last two sizes are those of the first.

    Args:
        node: A node of a body.
        x: The first operand.
        other: The second; its other dimensions broadcast to the first's.
    """
    require_broadcast("the second operand", other, x.shape, "the first's shape")
    require(
        other.rank >= 2
        and all(a == b for a, b in zip(other.shape[-2:], x.shape[-2:], strict=True)),
        "the second operand has shape {}, the first {}; their last two sizes must be equal",
        list(other.shape),
        list(x.shape),
    )


def into_first(node: Node, x: Tensor, other: Tensor) -> None:
    """Raise ShapeError unless the second operand broadcasts to the shape of the first.

    Args:
        node: A node of a body.
        x: The first operand.
        other: The second.
    """
    require_broadcast("the second operand", other, x.shape, "the first's shape")


def one_scale(node: Node, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> None:
    """Raise ShapeError unless there is one scale and one zero point for the whole tensor.

    Args:
        node: A QuantizeLinear or DequantizeLinear of a body.
        x: The tensor.
        scale: The scale, a scalar or of shape [1].
        zero: The zero point, shaped alike, of x's dtype where x is quantized.
    """
    for name, operand in (("the scale", scale), ("the zero point", zero)):
        if operand is not None:
            require(
                operand.rank <= 1 and all(size == 1 for size in operand.shape),
                "{} has shape {}; it must hold one number",
                name,
                list(operand.shape),
            )
    if node.op_type == "DequantizeLinear":
        require_dtype("the zero point", zero, x.dtype)


def all_keys(node: Node, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | None) -> None:
    """Raise ShapeError unless the mask of an Attention has an entry for each cached and new key.

    Args:
        node: An Attention or DecoderAttention of a body.
        q: Queries; not read.
        k: Keys.
        v: Values; not read.
        *rest: The mask, and of Attention cached keys and values.
    """
    if not rest or rest[0] is None:
        return
    mask = rest[0]
    past = rest[1] if len(rest) > 1 and node.op_type == "Attention" else None
    # The standard's Attention would broadcast a mask of one key to all keys.
    keys = k.shape[-2] if past is None else past.shape[-2] + k.shape[-2]
    require(
        mask.rank >= 1 and mask.shape[-1] == keys,
        "a mask or bias of shape {} for {} keys",
        list(mask.shape),
        keys,
    )


def all_batches(node: Node, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | None) -> None:
    """Raise ShapeError unless the mask of an Attention has all keys, for each batch.

    Args:
        node: An Attention of a body.
        q: Queries.
        k: Keys.
        v: Values; not read.
        *rest: The mask, and cached keys and values.
    """
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
declare("first_is_zero", domain="body", requires=first_is_zero)
declare("into_first", domain="body", requires=into_first)
declare("one_row", domain="body", requires=one_row)
declare("one_scale", domain="body", requires=one_scale)
declare("no_padding", domain="body", requires=no_padding)
declare("not_empty", domain="body", requires=not_empty)
declare("factors_of_rows", domain="body", requires=factors_of_rows)
declare("same_rows", domain="body", requires=same_rows)
declare("same_shape", domain="body", requires=same_shape)

"""Lowerings that use the lowering of another operator for a part of their work."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from subgraph.engine.planner.constants import derived_operand
from subgraph.engine.planner.lowering import Lowering, Unsupported
from subgraph.engine.planner.operands import Operand
from subgraph.graph.graph import Node, Value
from subgraph.graph.types import Array, TensorType


def delegate(
    low: Lowering,
    op_type: str,
    inputs: Sequence[Operand],
    output: Operand,
    **attributes: Any,
) -> None:
    """Lower ``op_type`` from inputs to an output, into the steps of ``low``.

    Args:
        low: The lowering that gets the steps.
        op_type: An operator of the standard.
        inputs: Its operands.
        output: Its only output.
        attributes: Its attributes.

    Raises:
        Unsupported: There is no lowering of that operator for the first input's dtype.
    """
    rule = low.registry.find(op_type)
    if rule is None or (rule.dtypes is not None and inputs[0].dtype not in rule.dtypes):
        raise Unsupported(f"{low.node.op_type} needs {op_type} of {inputs[0].dtype}")
    values = [Value(o.name, TensorType(o.dtype, o.shape)) for o in inputs]
    result = Value(output.name, TensorType(output.dtype, output.shape))
    node = Node(op_type, values, outputs=[result], name=low.node.name, attrs=attributes)
    inner = type(low)(
        node,
        inputs,
        [output],
        threads=low.threads,
        options=low.options,
        float_block=low.float_block,
    )
    rule.function(node, inner)
    low.steps.extend(inner.steps)


def _reshaped(array: Array, *, shape: tuple[int, ...]) -> Array:
    """Reshape the content of a weight."""
    return array.reshape(shape)


def viewed(low: Lowering, operand: Operand, shape: Sequence[int]) -> Operand:
    """Return an operand with the same content in another shape.

    Args:
        low: The lowering of the node, which derives a constant's new form.
        operand: The operand, plain layout.
        shape: The new shape, of as many elements.

    Returns:
        An operand over the same memory; for a constant, over a weight computed from it.
    """
    shape = tuple(shape)
    if operand.constant:
        weight = low.weight(f"as {shape}", partial(_reshaped, shape=shape), operand)
        return derived_operand(operand.name, operand.dtype, shape, weight)
    same = Operand(operand.name, operand.dtype, shape)
    same.storage, same.offset = operand.storage, operand.offset
    return same

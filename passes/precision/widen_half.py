"""The pass "WidenHalf": operators without half-precision kernels compute in float32.

A model in float16 or bfloat16 keeps its types: Casts before and after such an operator round each
result once, as the types of the standard require. Weights are widened when they are reformatted.
"""

from __future__ import annotations

import attrs

from subgraph.dtypes import HALF_FLOATS
from subgraph.engine.planner.lowering import LOWERINGS, LoweringRule
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.types import ONNX_DTYPE, TensorType
from subgraph.operators.operator import operator_key
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.system.registry import Registry
from subgraph.transform.pass_manager import apply_pass, register_pass

_CAST_VERSION = 13  # of the standard's operators: the first Cast that knows bfloat16


@register_pass("WidenHalf")
@attrs.frozen
class WidenHalf:
    """Put Casts around operators that a device computes in float32 only.

    Attributes:
        rules: The device's lowerings, which declare the dtypes of their kernels.
    """

    rules: Registry[LoweringRule] = LOWERINGS

    def __call__(self, graph: Graph) -> Graph:
        """Return a copy with a Cast before and after each such operator."""
        graph = apply_pass(graph, "ExpandFunctions")
        widened: dict[Value, Value] = {}
        replacements: dict[Value, Value] = {}
        for node in graph.nodes:
            if not self._wants_float32(node, replacements):
                continue
            node.inputs = tuple(_widened(v, widened, replacements) for v in node.inputs)
            for value in node.outputs:
                dtype = _half(value)
                if dtype:
                    assert isinstance(value.type, TensorType)
                    value.type = TensorType("float32", value.type.shape)
                    replacements[value] = cast_value(value, dtype, _CAST_VERSION)
        # Between two widened nodes both Casts stay: the first result must be rounded.
        graph.rewire(replacements)
        return graph

    def _wants_float32(self, node: Node, narrowed: dict[Value, Value]) -> bool:
        """Return whether the first input is half-precision and only float32 has a kernel."""
        if node.domain not in ("", INTERNAL_DOMAIN) or node.subgraph is not None:
            return False
        if node.bodies or not node.inputs:
            return False
        first = node.inputs[0]
        dtype = "" if first is None else _half(narrowed.get(first, first))
        rule = self.rules.find(operator_key(node.op_type, node.domain)) if dtype else None
        return (
            rule is not None
            and all(isinstance(value.type, TensorType) for value in node.outputs)
            and rule.dtypes is not None
            and dtype not in rule.dtypes
            and "float32" in rule.dtypes
        )


def _half(value: Value | None) -> str:
    """Return the dtype of a float16 or bfloat16 value, "" for any other value."""
    type_ = None if value is None else value.type
    return type_.dtype if isinstance(type_, TensorType) and type_.dtype in HALF_FLOATS else ""


def _widened(
    value: Value | None, widened: dict[Value, Value], narrowed: dict[Value, Value]
) -> Value | None:
    """Return the float32 form of a half-precision value; any other value as it is.

    Args:
        value: An input of a node.
        widened: Float32 forms by half-precision values; a new one is added.
        narrowed: Rounded results by the float32 outputs of widened nodes.
    """
    if value is None:
        return None
    half = narrowed.get(value, value)
    if not _half(half):
        return value
    if half not in widened:
        widened[half] = cast_value(half, "float32", _CAST_VERSION)
    return widened[half]


def cast_value(value: Value, dtype: str, version: int) -> Value:
    """Return the result of a new Cast of a value.

    Args:
        value: The value.
        dtype: The dtype of the result.
        version: Version of the operator.
    """
    node = Node("Cast", [value], version=version, attrs={"to": ONNX_DTYPE[dtype]})
    shape = value.type.shape if isinstance(value.type, TensorType) else None
    node.outputs[0].type = TensorType(dtype, shape)
    return node.outputs[0]

"""The pass "BlockwiseProducts": products with weights of few bits for which the CPU has kernels.

These are MatMulNBits, MatMul of a DequantizeLinear of 4 bits in blocks, the form of the standard,
and the products of QMoE, whose weights an index chooses. Others become products with float weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.types import ONNX_DTYPE
from subgraph.operators.inference import part_metadata
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.passes.patterns import Context, dtype_of, is_op, part_of, produced_by, shape_of
from subgraph.passes.simplify.constant_folding import ConstantsToParameters
from subgraph.passes.simplify.expand_functions import expand_functions
from subgraph.transform.pass_manager import register_pass

_OPERANDS = 6  # A, B, scales, zero points, groups, bias
# Not imported from ``ops/contrib``, which CPU loads only for models with its operators.
_BITS = (2, 4, 8)
_FOUR_BITS = ("int4", "uint4")
_CHOICE = "GatherBlockQuantized", "com.microsoft"
_LEAST_BLOCK = 16  # of MatMulNBits; larger ones are powers of two


def is_blockwise(node: Node) -> bool:
    """Return whether the pass may replace a node, or the reader of its result."""
    if node.domain == "com.microsoft" and node.op_type in ("MatMulNBits", "QMoE"):
        return True
    in_blocks = is_op(node, "DequantizeLinear") and node.attrs.get("block_size", 0)
    return bool(in_blocks) and dtype_of(node.inputs[0]) in _FOUR_BITS


def _is_n_bits(node: Node) -> bool:
    return (node.op_type, node.domain) == ("MatMulNBits", "com.microsoft")


def _is_experts(node: Node) -> bool:
    return (node.op_type, node.domain) == ("QMoE", "com.microsoft")


@register_pass("BlockwiseProducts", operators=("MatMulNBits", "QMoE", "DequantizeLinear"))
def blockwise_products(graph: Graph) -> Graph:
    """Return a copy in which products with constant weights of few bits keep them packed."""
    levels = {n.name: n.attrs.get("accuracy_level", 0) for n in graph.nodes if _is_experts(n)}
    if levels:
        # The context counts what is computed from parameters as weights, not what is computed from
        # the constants of a body.
        graph = ConstantsToParameters()(expand_functions(graph, only=("QMoE",)))
    else:
        graph = graph.clone()
    context = Context(graph)
    replaced: dict[Value, Value] = {}
    for node in graph.nodes:
        made = None
        if _is_n_bits(node) and _fits(context, node):
            made = _fused(node, node.inputs, {"bits": 4, **node.attrs})
        elif is_op(node, "MatMul"):
            made = _of_dequantized(context, node) or _of_chosen(context, node, levels)
        if made is not None:
            made.inputs = tuple(v if v is None else replaced.get(v, v) for v in made.inputs)
            replaced[node.outputs[0]] = made.outputs[0]
    graph.rewire(replaced)
    return graph


def _fused(
    node: Node,
    inputs: tuple[Value | None, ...],
    attributes: Mapping[str, object],
    op_type: str = "FusedMatMulNBits",
) -> Node:
    """Return the node that computes the result of ``node`` from packed weights."""
    made = Node(
        op_type,
        inputs,
        name=node.name,
        domain=INTERNAL_DOMAIN,
        attrs=attributes,
        metadata=part_metadata(node),
    )
    made.outputs[0].type = node.outputs[0].type
    return made


def _fits(context: Context, node: Node) -> bool:
    """Return whether there are kernels for a MatMulNBits."""
    operands: list[Value | None] = [*node.inputs, *[None] * _OPERANDS]
    a, packed, scales, zeros, groups, bias = operands[:_OPERANDS]
    bits, depth = int(node.attrs.get("bits", 4)), int(node.attrs["K"])
    constant = all(context.is_weight(v) for v in operands[1:] if v is not None)
    columns = (shape_of(a) or (None,))[-1]
    return (
        bits in _BITS
        # The kernels read words of 32 bits, whose rows all exist.
        and depth % (32 // bits) == 0
        and not node.attrs.get("weight_prepacked", 0)
        and dtype_of(a) == dtype_of(scales) == "float32"
        and (bias is None or dtype_of(bias) == "float32")
        and (zeros is None or dtype_of(zeros) == "uint8")
        and groups is None
        and constant
        and packed is not None
        and columns in (None, depth)
    )


def _of_dequantized(context: Context, node: Node) -> Node | None:
    """Return the fused node of a product with dequantized weights of 4 bits; None if it has none.

    Blocks are along K. The weights are brought into the form of MatMulNBits by operators of the
    standard, which the plan computes once.
    """
    conversion = produced_by(node.inputs[1], "DequantizeLinear")
    if conversion is None or not is_blockwise(conversion):
        return None
    weights, scales, zeros = [*conversion.inputs, None][:3]
    sizes, block = shape_of(weights) or (), int(conversion.attrs["block_size"])
    if len(sizes) != 2 or int(conversion.attrs.get("axis", 1)) % 2:
        return None
    depth, columns = sizes
    if not isinstance(depth, int) or not isinstance(columns, int) or not depth * columns:
        return None
    if block < _LEAST_BLOCK or block & (block - 1) or depth % block:
        return None
    if {dtype_of(node.inputs[0]), dtype_of(scales), dtype_of(conversion.outputs[0])} != {"float32"}:
        return None
    if not all(context.is_weight(v) for v in conversion.inputs if v is not None):
        return None
    if (shape_of(node.inputs[0]) or (depth,))[-1] not in (None, depth):
        return None
    blocks = depth // block
    # Other sizes are an error of the conversion, which reports it.
    if any(shape_of(each) != (blocks, columns) for each in (scales, zeros) if each is not None):
        return None
    if zeros is None and dtype_of(weights) == "uint4":  # MatMulNBits has a default of 8
        none = np.zeros((columns, -(-blocks // 2)), np.uint8)
        points: Value | None = part_of(node, "Constant", value=none)
    else:
        points = zeros and _packed(node, zeros, blocks, columns)
    operands = (
        node.inputs[0],
        _packed(node, weights, depth, columns),
        part_of(node, "Transpose", scales, perm=[1, 0]),
        points,
    )
    return _fused(node, operands, {"bits": 4, "block_size": block, "K": depth, "N": columns})


def _of_chosen(context: Context, node: Node, levels: Mapping[str, int]) -> Node | None:
    """Return the fused node of a product with matrices that an index chooses; None if it has none.

    The matrices are those of a GatherBlockQuantized of the body of a QMoE, the vectors columns.

    Args:
        context: The graph.
        node: The MatMul.
        levels: The ``accuracy_level`` of each QMoE, by its name.
    """
    stack, x = node.inputs
    gather = None if stack is None else stack.producer
    if gather is None or (gather.op_type, gather.domain) != _CHOICE:
        return None
    weights, indices, scales, zeros = [*gather.inputs, None][:4]
    sizes = [size for size in shape_of(weights) or () if isinstance(size, int)]
    if len(sizes) != 3 or not all(sizes) or dtype_of(weights) != "uint8":
        return None
    axes = gather.attrs.get("gather_axis", 0), gather.attrs.get("quantize_axis", 1)
    bits, block = int(gather.attrs.get("bits", 4)), int(gather.attrs.get("block_size", 128))
    columns, depth = sizes[1], sizes[2] * 8 // bits
    fits = (
        axes == (0, 2)
        and bits in _BITS
        # The kernels read words of 32 bits, whose rows all exist.
        and depth % (32 // bits) == 0
        and (depth % block == 0 or depth < block)
        and all(context.is_weight(v) for v in (weights, scales, zeros) if v is not None)
        and len(shape_of(indices) or ()) == 1
        and (shape_of(x) or ())[1:] == (depth, 1)
        and dtype_of(x) == dtype_of(scales) == "float32"
    )
    if not fits:
        return None
    level = levels.get((node.metadata or {}).get("origin", ""), 0)
    form = {"bits": bits, "block_size": block, "K": depth, "N": columns, "accuracy_level": level}
    return _fused(node, (x, indices, weights, scales, zeros), form, "FusedGroupedMatMulNBits")


def _packed(node: Node, numbers: Value | None, rows: int, columns: int) -> Value:
    """Return numbers of 4 bits ``[rows, columns]`` as bytes ``[columns, rows / 2]``.

    The even rows are the low bits. Signed numbers are increased by 8, as zero points are then.

    Args:
        node: The node that the new nodes are a part of.
        numbers: The numbers.
        rows: Their rows.
        columns: Their columns.
    """
    wide = part_of(node, "Cast", numbers, to=ONNX_DTYPE["int32"])
    if dtype_of(numbers) == "int4":
        wide = part_of(node, "Add", wide, part_of(node, "Constant", value=np.full(1, 8, np.int32)))
    columns_first = part_of(node, "Transpose", wide, perm=[1, 0])
    if rows % 2:
        more = part_of(node, "Constant", value=np.zeros((columns, 1), np.int32))
        columns_first = part_of(node, "Concat", columns_first, more, axis=1)
    pairs = part_of(node, "Constant", value=np.array([columns, -(-rows // 2), 2], np.int64))
    places = part_of(node, "Constant", value=np.array([1, 16], np.int32))
    split = part_of(node, "Reshape", columns_first, pairs)
    sums = part_of(node, "MatMul", split, places)
    return part_of(node, "Cast", sums, to=ONNX_DTYPE["uint8"])

"""The pass "BlockwiseProducts": products with weights of few bits for which the CPU has kernels.

These are MatMulNBits, MatMul of a DequantizeLinear, the form of the standard, and the products of
QMoE, whose weights an index chooses. Others become products with float weights. Products with float
weights become products with weights of few bits if the caller wants that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from subgraph.dtypes import DTYPES, HALF_FLOATS
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.types import ONNX_DTYPE, TensorType
from subgraph.operators.inference import part_metadata
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.passes.patterns import Context, dtype_of, is_op, part_of, produced_by, shape_of
from subgraph.passes.simplify.constant_folding import ConstantsToParameters
from subgraph.passes.simplify.expand_functions import expand_functions
from subgraph.transform.pass_manager import register_pass

_OPERANDS = 6  # A, B, scales, zero points, groups, bias
# Not imported from ``ops/contrib``, which CPU loads only for models with its operators.
_BITS = (2, 4, 8)
_FLOATS = ("float32", *HALF_FLOATS)
_NUMBERS = ("int4", "uint4", "int8", "uint8")  # of weights behind a DequantizeLinear
_CHOICE = "GatherBlockQuantized", "com.microsoft"
_LEAST_BLOCK = 16  # of MatMulNBits; larger ones are powers of two
# Elements of a column that share a scale when float weights are compressed, by their bits: with
# these, scales and zero points add 10 % or less to 8 bits, and 28 % to 4 bits, for which larger
# blocks lose more accuracy.
_COMPRESSED_BLOCK = {8: 128, 4: 32}
# Elements of float weights from which they are compressed: smaller ones stay in the caches, and an
# exported model has many that cost accuracy alone (estimate).
_LEAST_COMPRESSED = 1 << 14
_TINY = float(np.finfo(np.float32).tiny)  # scale of a block of zeros


def is_blockwise(node: Node) -> bool:
    """Return whether the pass may replace a node, or the reader of its result."""
    if node.domain == "com.microsoft" and node.op_type in ("MatMulNBits", "QMoE"):
        return True
    if not is_op(node, "DequantizeLinear") or dtype_of(node.inputs[0]) not in _NUMBERS:
        return False
    return any(is_op(user, "MatMul") for user in node.successors())


def _is_n_bits(node: Node) -> bool:
    return (node.op_type, node.domain) == ("MatMulNBits", "com.microsoft")


def _is_experts(node: Node) -> bool:
    return (node.op_type, node.domain) == ("QMoE", "com.microsoft")


@register_pass(
    "BlockwiseProducts", operators=("MatMulNBits", "QMoE", "DequantizeLinear", "MatMul", "Gemm")
)
def blockwise_products(
    graph: Graph, group_size: int = 0, compress: int = 0, prefix: str = ""
) -> Graph:
    """Return a copy in which products with constant weights of few bits keep them packed.

    Args:
        graph: The graph.
        group_size: Round the other operand to int8, with a scale for each so many elements of a row
            at most; 0: only where the model allows it, with a scale for each block.
        compress: Bits, 8 or 4, to which float weights are rounded; 0: they stay as they are.
        prefix: What names of parameters begin with that replace constants.
    """
    levels = {n.name: n.attrs.get("accuracy_level", 0) for n in graph.nodes if _is_experts(n)}
    if levels:
        graph = expand_functions(graph, only=("QMoE",))
    # The context counts what is computed from parameters as weights, not what is computed from
    # constants, such as those of a body.
    if levels or compress:
        graph = ConstantsToParameters(0 if levels else _LEAST_COMPRESSED, prefix)(graph)
    else:
        graph = graph.clone()
    context = Context(graph)
    replaced: dict[Value, Value] = {}
    for node in graph.nodes:
        made = None
        if _is_n_bits(node) and _fits(context, node):
            made = _Product(node.inputs, {"bits": 4, **node.attrs})
        elif is_op(node, "MatMul"):
            made = _of_dequantized(context, node) or _of_chosen(context, node, levels)
        if made is None and compress:
            made = _compressed(context, node, compress)
        if made is not None:
            inputs = [v if v is None else replaced.get(v, v) for v in made.inputs]
            attributes = {**made.attributes, "group_size": group_size}
            product = made._replace(inputs=inputs, attributes=attributes)
            replaced[node.outputs[0]] = _fused(node, product)
    graph.rewire(replaced)
    return graph


class _Product(NamedTuple):
    """The parts of a fused node.

    Attributes:
        inputs: Its inputs.
        attributes: Its attributes.
        op_type: Its operator.
    """

    inputs: Sequence[Value | None]
    attributes: Mapping[str, object]
    op_type: str = "FusedMatMulNBits"


def _fused(node: Node, product: _Product) -> Value:
    """Return the result of ``node`` as a fused node computes it from packed weights.

    The node computes in float32; operands and results of half precision are converted.
    """
    given = [
        part_of(node, "Cast", value, to=ONNX_DTYPE["float32"])
        if dtype_of(value) in HALF_FLOATS
        else value
        for value in product.inputs
    ]
    made = Node(
        product.op_type,
        given,
        name=node.name,
        domain=INTERNAL_DOMAIN,
        attrs=product.attributes,
        metadata=part_metadata(node),
    )
    (result,) = made.outputs
    result.type = node.outputs[0].type
    dtype = dtype_of(result)
    if isinstance(result.type, TensorType) and dtype in HALF_FLOATS:
        result.type = TensorType("float32", result.type.shape)
        return part_of(node, "Cast", result, to=ONNX_DTYPE[dtype])
    return result


def _fits(context: Context, node: Node) -> bool:
    """Return whether there are kernels for a MatMulNBits."""
    operands: list[Value | None] = [*node.inputs, *[None] * _OPERANDS]
    a, packed, scales, zeros, groups, bias = operands[:_OPERANDS]
    bits, depth = int(node.attrs.get("bits", 4)), int(node.attrs["K"])
    constant = all(context.is_weight(v) for v in operands[1:] if v is not None)
    return (
        bits in _BITS
        # The kernels read words of 32 bits, whose rows all exist.
        and depth % (32 // bits) == 0
        and not node.attrs.get("weight_prepacked", 0)
        and dtype_of(a) in _FLOATS
        and dtype_of(scales) == dtype_of(a)
        and (bias is None or dtype_of(bias) == dtype_of(a))
        and (zeros is None or dtype_of(zeros) == "uint8")
        and groups is None
        and constant
        and packed is not None
        and _has_depth(a, depth)
    )


def _of_dequantized(context: Context, node: Node) -> _Product | None:
    """Return the fused form of a product with dequantized weights; None if it has none.

    The weights are brought into the form of MatMulNBits by operators of the standard, which the
    plan computes once.
    """
    conversion = produced_by(node.inputs[1], "DequantizeLinear")
    if conversion is None or not is_blockwise(conversion):
        return None
    if produced_by(node.inputs[0], "DequantizeLinear") is not None:
        return None  # a product of integers
    weights, scales, zeros = [*conversion.inputs, None][:3]
    sizes = shape_of(weights) or ()
    if len(sizes) != 2:
        return None
    depth, columns = sizes
    if not isinstance(depth, int) or not isinstance(columns, int) or not depth * columns:
        return None
    block = _block_size(conversion, depth, columns)
    if block < _LEAST_BLOCK or block & (block - 1):
        return None
    floats = {dtype_of(v) for v in (node.inputs[0], scales, conversion.outputs[0])}
    if len(floats) > 1 or floats.isdisjoint(_FLOATS):
        return None
    if not all(context.is_weight(v) for v in conversion.inputs if v is not None):
        return None
    if not _has_depth(node.inputs[0], depth):
        return None
    # Other sizes are an error of the conversion, which reports it.
    if zeros is not None and shape_of(zeros) != shape_of(scales):
        return None
    bits, blocks = DTYPES[dtype_of(weights) or ""].bits, depth // block
    every = part_of(node, "Constant", value=np.array([blocks, columns], np.int64))
    points: Value | None = None
    if zeros is not None:
        points = part_of(node, "Expand", _unsigned(node, zeros, bits), every)
        points = _packed(node, points, blocks, columns, bits)
    elif dtype_of(weights) in ("uint4", "uint8"):  # MatMulNBits has a default of half the range
        none = np.zeros((columns, -(-blocks * bits // 8)), np.uint8)
        points = part_of(node, "Constant", value=none)
    operands = (
        node.inputs[0],
        _packed(node, _unsigned(node, weights, bits), depth, columns, bits),
        part_of(node, "Transpose", part_of(node, "Expand", scales, every), perm=[1, 0]),
        points,
    )
    return _Product(operands, {"bits": bits, "block_size": block, "K": depth, "N": columns})


def _has_depth(x: Value | None, depth: int) -> bool:
    """Return whether rows of a left operand may have ``depth`` elements."""
    columns = (shape_of(x) or (depth,))[-1]
    # Other sizes of a name are an error, which the fused node reports.
    return columns == depth or not isinstance(columns, int)


def _compressed(context: Context, node: Node, bits: int) -> _Product | None:
    """Return a product with float weights as one with weights of few bits; None if it stays.

    Each block of a column is rounded to whole multiples of its scale, counted from a zero point, so
    that 0 stays 0. Operators of the standard do this (`_quantized`); the plan computes them once,
    and again when the weights change.

    Args:
        context: The graph.
        node: The product.
        bits: Bits of a number.
    """
    transposed, bias = False, None
    if is_op(node, "Gemm"):
        factors = node.attrs.get("alpha", 1.0), node.attrs.get("beta", 1.0)
        transposed, bias = bool(node.attrs.get("transB", 0)), [*node.inputs, None][2]
        if factors != (1.0, 1.0) or node.attrs.get("transA", 0):
            return None
    elif not is_op(node, "MatMul"):
        return None
    x, weights = node.inputs[:2]
    sizes = shape_of(weights) or ()
    if len(sizes) != 2:
        return None
    depth, columns = sizes[::-1] if transposed else sizes
    if not isinstance(depth, int) or not isinstance(columns, int) or not depth * columns:
        return None
    block, rows = min(depth & -depth, _COMPRESSED_BLOCK[bits]), ((columns,), (1, columns))
    fits = (
        depth * columns >= _LEAST_COMPRESSED
        and block >= _LEAST_BLOCK
        and context.is_weight(weights)
        and (bias is None or (context.is_weight(bias) and shape_of(bias) in rows))
        and dtype_of(x) in _FLOATS
        and dtype_of(weights) == dtype_of(x)
        and _has_depth(x, depth)
    )
    if not fits:
        return None

    floats = part_of(node, "Cast", weights, to=ONNX_DTYPE["float32"])
    floats = part_of(node, "Transpose", floats, perm=[1, 0]) if transposed else floats
    operands = (x, *_quantized(node, floats, (depth, columns, block), bits), None, bias)
    return _Product(operands, {"bits": bits, "block_size": block, "K": depth, "N": columns})


def _quantized(
    node: Node, weights: Value, sizes: tuple[int, int, int], bits: int
) -> tuple[Value, Value, Value]:
    """Return float32 weights in the form of MatMulNBits: packed numbers, scales, zero points.

    Args:
        node: The node that the new nodes are a part of.
        weights: The weights.
        sizes: Their rows and columns, and the rows of a block.
        bits: Bits of a number.
    """
    part, (depth, columns, block) = partial(part_of, node), sizes

    def number(value: float) -> Value:
        return part("Constant", value=np.array(value, np.float32))

    def shaped(value: Value, *shape: int) -> Value:
        return part("Reshape", value, part("Constant", value=np.array(shape, np.int64)))

    blocks, most = depth // block, number((1 << bits) - 1)
    rows = shaped(weights, blocks, block, columns)
    high = part("Max", part("ReduceMax", rows, axes=[1]), number(0))
    low = part("Min", part("ReduceMin", rows, axes=[1]), number(0))
    scale = part("Max", part("Div", part("Sub", high, low), most), number(_TINY))
    zero = part("Round", part("Div", part("Neg", low), scale))
    counted = part("Add", part("Round", part("Div", rows, scale)), zero)
    counted = part("Clip", counted, number(0), most)
    numbers, zeros = (part("Cast", each, to=ONNX_DTYPE["int32"]) for each in (counted, zero))
    return (
        _packed(node, shaped(numbers, depth, columns), depth, columns, bits),
        part("Transpose", shaped(scale, blocks, columns), perm=[1, 0]),
        _packed(node, shaped(zeros, blocks, columns), blocks, columns, bits),
    )


def _block_size(conversion: Node, depth: int, columns: int) -> int:
    """Return how many numbers of a column have one scale; 0 if scales are not along columns.

    Args:
        conversion: The DequantizeLinear of a matrix of weights.
        depth: Rows of the matrix.
        columns: Columns of the matrix.
    """
    scales, axis = shape_of(conversion.inputs[1]), int(conversion.attrs.get("axis", 1)) % 2
    block = int(conversion.attrs.get("block_size", 0))
    if block:
        fits = axis == 0 and not depth % block and scales == (depth // block, columns)
        return block if fits else 0
    fits = scales in ((), (1,)) or (axis == 1 and scales == (columns,))
    return depth & -depth if fits else 0  # the largest power of two that divides the depth


def _of_chosen(context: Context, node: Node, levels: Mapping[str, int]) -> _Product | None:
    """Return the fused form of a product with matrices that an index chooses; None if it has none.

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
        and dtype_of(x) in _FLOATS
        and dtype_of(scales) == dtype_of(x)
    )
    if not fits:
        return None
    level = levels.get((node.metadata or {}).get("origin", ""), 0)
    form = {"bits": bits, "block_size": block, "K": depth, "N": columns, "accuracy_level": level}
    return _Product((x, indices, weights, scales, zeros), form, "FusedGroupedMatMulNBits")


def _unsigned(node: Node, numbers: Value | None, bits: int) -> Value:
    """Return weights or zero points as int32, signed ones plus half of their range."""
    wide = part_of(node, "Cast", numbers, to=ONNX_DTYPE["int32"])
    if dtype_of(numbers) in ("uint4", "uint8"):
        return wide
    half = np.full(1, 1 << (bits - 1), np.int32)
    return part_of(node, "Add", wide, part_of(node, "Constant", value=half))


def _packed(node: Node, numbers: Value, rows: int, columns: int, bits: int) -> Value:
    """Return numbers ``[rows, columns]`` as bytes ``[columns, rows * bits / 8]``, low bits first.

    Args:
        node: The node that the new nodes are a part of.
        numbers: The numbers, int32.
        rows: Their rows.
        columns: Their columns.
        bits: Bits of a number.
    """
    columns_first, count = part_of(node, "Transpose", numbers, perm=[1, 0]), 8 // bits
    if count > 1:
        if rows % count:
            none = np.zeros((columns, -rows % count), np.int32)
            more = part_of(node, "Constant", value=none)
            columns_first = part_of(node, "Concat", columns_first, more, axis=1)
        bytes_ = part_of(node, "Constant", value=np.array([columns, -1, count], np.int64))
        places = part_of(node, "Constant", value=np.array([1, 16], np.int32))  # of 4 bits
        split = part_of(node, "Reshape", columns_first, bytes_)
        columns_first = part_of(node, "MatMul", split, places)
    return part_of(node, "Cast", columns_first, to=ONNX_DTYPE["uint8"])

"""ONNX Runtime's operators on weights of 2, 4 or 8 bits, quantized in blocks.

The bodies convert weights to floats. That depends on weights alone, so it is computed once, when a
model is compiled. CPU multiplies by most weights as they are (`blockwise_cpu`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.graph.graph import Node, Value
from subgraph.graph.types import Array, TensorType, ValueType
from subgraph.operators.functions import Call, Results, function
from subgraph.operators.operator import declare
from subgraph.operators.reference import evaluate
from subgraph.operators.requirements import (
    Tensor,
    require,
    require_dtype,
    require_rank,
    require_shape,
)
from subgraph.operators.schema import INTERNAL_DOMAIN, MICROSOFT
from subgraph.ops.elementwise.op import Types, Values, tensor


def unpacked(call: Call, packed_weights: Any, bits: int) -> Any:
    """Return the numbers of ``bits`` bits packed in bytes, low bits first, as uint8.

    They follow each other along the last dimension.
    """
    if bits == 8:
        return packed_weights
    if bits not in (2, 4):
        raise call.unsupported(f"bits={bits}")
    mask = call.constant((1 << bits) - 1, "uint8")
    parts: list[Any] = []
    # Each part is computed along whole rows; an innermost dimension of 8 / bits shifts would leave
    # vectors nearly empty.
    for shift in range(0, 8, bits):
        part = packed_weights
        if shift:
            part = call.BitShift(part, call.constant(shift, "uint8"), direction="RIGHT")
        if shift + bits < 8:
            part = call.BitwiseAnd(part, mask)
        parts.append(call.Unsqueeze(part, [-1]))
    numbers = call.Concat(*parts, axis=-1)
    unchanged = [0] * (call.rank(packed_weights) - 1)
    last = call.shape(packed_weights)[-1]
    # Reshape cannot compute a size (-1) if another dimension is empty.
    size = last * (8 // bits) if isinstance(last, int) else -1
    return call.Reshape(numbers, [*unchanged, size])


def _first_columns(call: Call, x: Any, count: int) -> Any:
    """Return the first ``count`` elements of each row."""
    if call.shape(x)[-1] == count:
        return x
    return call.Slice(x, [0], [count], [-1])


# Most rows, or columns, of a matrix of weights: the bytes of a larger one could exceed what kernels
# can address (estimate).
_MAX_SIZE = 1 << 24
BITS = (2, 4, 8)
LEAST_BLOCK = 16


def require_blocks(width: int) -> None:
    """Require a block size that ONNX Runtime supports: a power of two, at least 16."""
    require(
        width >= LEAST_BLOCK and width & (width - 1) == 0 and width <= _MAX_SIZE,
        "block_size is {}; it is a power of two from 16 on",
        width,
    )


def _refuse_bits(call: Call, bits: int) -> None:
    if bits not in BITS:
        raise call.unsupported(f"bits={bits}")


def matmul_n_bits_operands(
    node: Node, _a: Tensor, packed_weights: Tensor, scales: Tensor, zeros: Tensor | None = None,
    groups: Tensor | None = None, bias: Tensor | None = None,
) -> None:  # fmt: skip
    """Raise ShapeError unless weights, scales and zero points have the sizes of N and K.

    Args:
        node: The MatMulNBits: ``N``, ``K``, ``bits``, ``block_size``.
        packed_weights: N rows of blocks of K, packed in bytes.
        scales: One for each block.
        zeros: Zero points of the blocks, packed (uint8) or of A's dtype; None: 2 ** (bits - 1).
        groups: ``g_idx``: block of each of K; None: in order.
        bias: [N].
    """
    width, rows, depth = (int(node.attrs[name]) for name in ("block_size", "N", "K"))
    bits = node.attrs.get("bits", 4)
    if bits not in BITS:
        return  # the body refuses the node
    require_blocks(width)
    for name, count in (("N", rows), ("K", depth)):
        require(1 <= count <= _MAX_SIZE, "{} is {}, outside [1, {}]", name, count, _MAX_SIZE)
    blocks = -(-depth // width)
    packed = -(-blocks * bits // 8)
    require_dtype("B", packed_weights, "uint8")
    in_bytes = zeros is not None and zeros.dtype == "uint8"
    counts = {
        "B": (packed_weights, rows * blocks * (width * bits // 8)),
        "scales": (scales, rows * blocks),
        "zero_points": (zeros, rows * (packed if in_bytes else blocks)),
        "bias": (bias, rows),
    }
    for name, (operand, count) in counts.items():
        require(
            operand is None or operand.size == count,
            "{} has {} elements; by N, K, block_size and bits it needs {}",
            name,
            None if operand is None else operand.size,
            count,
        )
    if groups is not None:
        require_rank("g_idx", groups, 1)
        require(
            groups.size == depth or groups.size == blocks * width,
            "g_idx has {} elements for K of {}",
            groups.size,
            depth,
        )


@function(
    "MatMulNBits",
    "A, B, scales, zero_points?, g_idx?, bias? -> Y",
    requires=matmul_n_bits_operands,
    K="int!",
    N="int!",
    accuracy_level=0,
    bits=4,
    block_size="int!",
    weight_prepacked=0,
)
def matmul_n_bits(call: Call) -> Results:
    """Multiply by the transposed matrix of weights."""
    a, packed_weights, scales, zeros, groups, bias = call.inputs
    call.refuse_all_but(weight_prepacked=0)
    rows, depth, bits = (call.attribute(name) for name in ("N", "K", "bits"))
    width = call.attribute("block_size")
    _refuse_bits(call, bits)
    blocks = -(-depth // width)
    bytes_of_row = blocks * (width * bits // 8)
    numbers = unpacked(call, call.Reshape(packed_weights, [rows, bytes_of_row]), bits)
    factors = call.Reshape(scales, [rows, blocks])
    centre: Any = float(1 << (bits - 1))
    dtype = call.dtype(a)
    if zeros is not None and call.dtype(zeros) == "uint8":
        packed = call.Reshape(zeros, [rows, -(-blocks * bits // 8)])
        centre = call.cast(_first_columns(call, unpacked(call, packed, bits), blocks), dtype)
    elif zeros is not None:
        centre = call.cast(call.Reshape(zeros, [rows, blocks]), dtype)
    if groups is None:
        block_of: Any = call.constant(np.arange(depth) // width, "int64")
    else:
        call.size(groups, 0)  # raises for an unknown size; then the reference runs the node
        block_of = _first_columns(call, groups, depth)
    if isinstance(centre, Value):
        centre = call.Gather(centre, block_of, axis=1)
    # Rows are padded to whole blocks; elements from K on have no meaning.
    centred = call.Sub(call.cast(_first_columns(call, numbers, depth), dtype), centre)
    weights = call.Mul(centred, call.Gather(factors, block_of, axis=1))
    product = call.MatMul(a, call.Transpose(weights, perm=(1, 0)))
    return [product if bias is None else call.Add(product, bias, requires="one_row")]


# The numbers that codes of four bits stand for, by ``quant_type``: FP4, whose eight numbers follow
# with the other sign, and NF4, quantiles of the normal distribution (Dettmers et al., "QLoRA",
# 2023).
_FP4 = (0.0, 0.0052083333, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25)
_NF4 = (
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
)  # fmt: skip


def matmul_bnb4_operands(node: Node, a: Tensor, packed_weights: Tensor, scales: Tensor) -> None:
    """Raise ShapeError unless weights and scales have the sizes of N and K.

    Args:
        node: The MatMulBnb4: ``N``, ``K``, ``block_size``, ``quant_type``.
        a: Rows of K elements; of N with ``transB`` 0.
        packed_weights: uint8 ``[(N * K + 1) / 2]``.
        scales: ``absmax``, one for each block.
    """
    width, rows, depth = (int(node.attrs[name]) for name in ("block_size", "N", "K"))
    require_blocks(width)
    for name, count in (("N", rows), ("K", depth)):
        require(1 <= count <= _MAX_SIZE, "{} is {}, outside [1, {}]", name, count, _MAX_SIZE)
    require(node.attrs["quant_type"] in (0, 1), "quant_type is {}", node.attrs["quant_type"])
    require_dtype("B", packed_weights, "uint8")
    require_shape("B", packed_weights, (-(-rows * depth // 2),), "two numbers in a byte")
    require_shape("absmax", scales, (-(-rows * depth // width),), "one for each block")
    require_dtype("absmax", scales, a.dtype)
    terms = depth if node.attrs.get("transB", 1) else rows
    require(a.rank >= 1 and a.shape[-1] == terms, "A of shape {} for {} terms", a.shape, terms)


@function(
    "MatMulBnb4",
    "A, B, absmax -> Y",
    requires=matmul_bnb4_operands,
    K="int!",
    N="int!",
    block_size="int!",
    quant_type="int!",
    training_mode=0,
    transB=1,
)
def matmul_bnb4(call: Call) -> Results:
    """Multiply by a matrix of weights that bitsandbytes has quantized."""
    a, packed_weights, scales = call.inputs
    rows, depth, width = (call.attribute(name) for name in ("N", "K", "block_size"))
    numbers = _NF4 if call.attribute("quant_type") else (*_FP4, *(-number for number in _FP4))
    # The first of two numbers has the high bits.
    high = call.Div(packed_weights, call.constant(16, "uint8"))
    low = call.BitwiseAnd(packed_weights, call.constant(15, "uint8"))
    codes = call.Concat(*(call.Unsqueeze(x, [1]) for x in (high, low)), axis=1)
    codes = call.cast(call.Reshape(codes, [-1]), "int32")
    table = call.constant(np.array(numbers, np.float32), call.dtype(a))
    block_of = call.constant(np.arange(rows * depth) // width, "int64")
    values = call.Gather(table, _first_columns(call, codes, rows * depth))
    matrix: Any = call.Reshape(call.Mul(values, call.Gather(scales, block_of)), [rows, depth])
    if call.attribute("transB"):
        matrix = call.Transpose(matrix, perm=(1, 0))
    return [call.MatMul(a, matrix)]


def block_numbers(packed: Array, bits: int) -> Array:
    """Return the numbers of ``bits`` bits in the bytes of rows, low bits first, as uint8.

    Args:
        packed: uint8 ``[rows, bytes]``.
        bits: 2, 4 or 8.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    numbers = (packed[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return numbers.reshape(len(packed), -1)


def _fused_operands(
    node: Node, a: Tensor, packed_weights: Tensor, scales: Tensor, zeros: Tensor | None = None,
    groups: Tensor | None = None, bias: Tensor | None = None,
) -> None:  # fmt: skip
    """Raise ShapeError unless the operands have the sizes of N and K; see the function above."""
    matmul_n_bits_operands(node, a, packed_weights, scales, zeros, groups, bias)
    depth = int(node.attrs["K"])
    require(
        a.rank > 0 and a.shape[-1] == depth, "A has shape {}; its rows have K = {}", a.shape, depth
    )


def _fused_types(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Infer the type of FusedMatMulNBits: A's, with N columns.

    Args:
        node: The node.
        types: Types of the inputs; None where unknown.
        values: Known contents of the inputs (unused).
    """
    a = tensor(types[0])
    if a is None or not a.shape:
        return [a and TensorType(a.dtype)]
    return [TensorType(a.dtype, (*a.shape[:-1], int(node.attrs["N"])))]


def _fused_product(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the result of MatMulNBits."""
    form = {name: node.attrs[name] for name in ("bits", "block_size", "K", "N")}
    return evaluate(Node("MatMulNBits", node.inputs, domain=MICROSOFT, attrs=form), inputs)


# MatMulNBits of float32 with bytes as zero points and without groups, whose words of 32 bits have
# rows that exist only: for CPU, whose kernels read weights as they are packed.
declare(
    "FusedMatMulNBits",
    domain=INTERNAL_DOMAIN,
    requires=_fused_operands,
    infer=_fused_types,
    compute=_fused_product,
)


def _grouped_operands(
    node: Node, x: Tensor, indices: Tensor, packed_weights: Tensor, scales: Tensor,
    zeros: Tensor | None = None,
) -> None:  # fmt: skip
    """Raise ShapeError unless vectors, matrices, scales and zero points fit.

    FusedGroupedMatMulNBits is ``W[i] @ x`` for columns x and matrices W of few bits, ``[E, N, K]``.

    Args:
        node: The FusedGroupedMatMulNBits: ``N``, ``K``, ``bits``, ``block_size``.
        x: [B, K, 1].
        indices: Numbers of matrices, [B].
        packed_weights: [E, N, K * bits / 8], uint8.
        scales: [E, N, blocks].
        zeros: [E, N, bytes of the blocks], uint8.
    """
    width, rows, depth, bits = (int(node.attrs[k]) for k in ("block_size", "N", "K", "bits"))
    require_rank("weights", packed_weights, 3)
    blocks, experts = -(-depth // width), packed_weights.shape[0]
    require_dtype("indices", indices, "int32", "int64")
    require_rank("indices", indices, 1)
    require_shape("x", x, (indices.shape[0], depth, 1), "a vector for each index")
    require_dtype("weights", packed_weights, "uint8")
    require_shape("weights", packed_weights, (experts, rows, depth * bits // 8), "of each matrix")
    require_shape("scales", scales, (experts, rows, blocks), "one for each block")
    require_dtype("zero_points", zeros, "uint8")
    packed = (experts, rows, -(-blocks * bits // 8))
    require_shape("zero_points", zeros, packed, "one for each block")


def _grouped_types(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Infer the type of FusedGroupedMatMulNBits: a vector of N elements for each index."""
    x = tensor(types[0])
    if x is None or x.shape is None:
        return [x]
    return [TensorType(x.dtype, (x.shape[0], int(node.attrs["N"]), 1))]


def _grouped_product(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the product of each vector and the dequantized matrix of its index."""
    x, indices, packed_weights, *numbers = inputs
    form = {name: node.attrs[name] for name in ("bits", "block_size")}
    form |= {"gather_axis": 0, "quantize_axis": 2}
    operands = [node.inputs[2], node.inputs[1], *node.inputs[3:]]
    gather = Node("GatherBlockQuantized", operands, domain=MICROSOFT, attrs=form)
    (matrices,) = evaluate(gather, [packed_weights, indices, *numbers])
    return [matrices @ x]


# QMoE of float32 on CPU, whose kernels read weights as they are packed.
declare(
    "FusedGroupedMatMulNBits",
    domain=INTERNAL_DOMAIN,
    requires=_grouped_operands,
    infer=_grouped_types,
    compute=_grouped_product,
)


def gather_block_quantized_operands(
    node: Node, data: Tensor, _indices: Tensor, scales: Tensor, zeros: Tensor | None = None
) -> None:
    """Raise ShapeError unless there is a scale, and a zero point, for each block of the table.

    Args:
        node: The GatherBlockQuantized: ``block_size``, ``bits``, ``quantize_axis``.
        data: The table; uint8 packs ``8 / bits`` numbers in a byte along the last axis.
        scales: Of the table's shape, with blocks for elements along the axis.
        zeros: Zero points, as ``scales``, packed as the table.
    """
    width, bits = node.attrs.get("block_size", 128), node.attrs.get("bits", 4)
    bits = bits if data.dtype == "uint8" else 8
    if bits not in BITS:
        return  # the body refuses the node
    require(data.rank >= 1, "the table is a scalar")
    require_blocks(width)
    along = node.attrs.get("quantize_axis", 1) % data.rank
    per_byte = 8 // bits  # numbers of a byte, along the last axis
    sizes = [*data.shape[:-1], data.shape[-1] * per_byte]
    sizes[along] = -(-sizes[along] // width)
    require_shape("scales", scales, sizes, "one for each block")
    require_dtype("zero_points", zeros, data.dtype)
    sizes[-1] = -(-sizes[-1] // per_byte)
    require_shape("zero_points", zeros, sizes, "one for each block, packed as the table is")


@function(
    "GatherBlockQuantized",
    "data, indices, scales, zero_points? -> output",
    requires=gather_block_quantized_operands,
    bits=4,
    block_size=128,
    gather_axis=0,
    quantize_axis=1,
)
def gather_block_quantized(call: Call) -> Results:
    """Gather rows of a quantized table, and dequantize them."""
    data, indices, scales, zeros = call.inputs
    rank, dtype = call.rank(data), call.dtype(scales)
    of, along = (call.attribute(f"{name}_axis") % rank for name in ("gather", "quantize"))
    if of == along or call.dtype(data).startswith("float"):
        raise call.unsupported("blocks along the axis of the indices, or tables of floats")
    packed = call.dtype(data) == "uint8"
    bits = call.attribute("bits") if packed else 8
    _refuse_bits(call, bits)
    picked = [
        None if x is None else call.Gather(x, indices, axis=of) for x in (data, scales, zeros)
    ]
    numbers = call.cast(unpacked(call, picked[0], bits), dtype)
    # Gather replaces one axis by those of the indices, which moves all later axes.
    axis = along + (call.rank(indices) - 1 if along > of else 0)
    size, width = call.size(numbers, axis), call.attribute("block_size")
    # Without zero points the middle of the range of packed numbers, which are unsigned, is 0.
    centre: Any = float(1 << (bits - 1)) if packed else None
    if zeros is not None:
        centre = call.cast(unpacked(call, picked[2], bits), dtype)
    factors = picked[1]
    whole = axis == call.rank(numbers) - 1 and size % width == 0
    shape = None
    if whole:  # a scale broadcasts to its block
        shape = call.Shape(numbers)
        numbers = call.Reshape(numbers, [*[0] * axis, size // width, width])

    def spread(x: Any) -> Any:
        """Return a number of each block for all of its elements."""
        if whole:
            # Packed zero points may end with padding.
            return call.Unsqueeze(_first_columns(call, x, size // width), [-1])
        return call.Gather(x, call.constant(np.arange(size) // width, "int64"), axis=axis)

    if isinstance(centre, Value):
        centre = spread(centre)
    if centre is not None:
        numbers = call.Sub(numbers, centre)
    made = call.Mul(numbers, spread(factors))
    return [call.Reshape(made, shape) if whole else made]

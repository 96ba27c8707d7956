"""ONNX Runtime's operators on weights of 2, 4 or 8 bits in blocks with a scale each.

The weights become floats once, when a model is compiled: what follows from weights alone is not
computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.graph.graph import Node, Value
from subgraph.operators.functions import Call, function
from subgraph.operators.requirements import (
    Tensor,
    require,
    require_dtype,
    require_rank,
    require_shape,
)

Results = Sequence[Value | None]


def _axes(call: Call, *axes: int) -> Value:
    return call.constant(axes, "int64")


def _unpacked(call: Call, held: Any, bits: int) -> Any:
    """Return the numbers that bytes hold, low bits first, along the last dimension."""
    if bits == 8:
        return held
    if bits not in (2, 4):
        raise call.unsupported(f"bits={bits}")
    # Divided, not shifted: the reference takes a shift element by element.
    places = call.constant([1 << place for place in range(0, 8, bits)], "uint8")
    shifted = call.Div(call.Unsqueeze(held, _axes(call, -1)), places)
    numbers = call.BitwiseAnd(shifted, call.constant((1 << bits) - 1, "uint8"))
    kept = [0] * (call.rank(held) - 1)
    return call.Reshape(numbers, _axes(call, *kept, -1))


def _first(call: Call, x: Any, count: int) -> Any:
    """Return the first elements of each row."""
    if call.shape(x)[-1] == count:
        return x
    return call.Slice(x, _axes(call, 0), _axes(call, count), _axes(call, -1))


# Rows and columns of a matrix of weights: beyond, its bytes pass what kernels count.
_MOST = 1 << 24
_BITS = (2, 4, 8)


def _require_blocks(width: int) -> None:
    """Require a size of blocks as ONNX Runtime has them: a power of two, at least 16."""
    require(
        width >= 16 and width & (width - 1) == 0 and width <= _MOST,
        "block_size is {}; it is a power of two from 16 on",
        width,
    )


def _refuse_bits(call: Call, bits: int) -> None:
    if bits not in _BITS:
        raise call.unsupported(f"bits={bits}")


def matmul_n_bits_operands(
    node: Node, _a: Tensor, held: Tensor, scales: Tensor, zeros: Tensor | None = None,
    groups: Tensor | None = None, bias: Tensor | None = None,
) -> None:  # fmt: skip
    """Raise ShapeError unless weights and what belongs to them have the sizes of N and K."""
    width, rows, depth = (int(node.attrs[name]) for name in ("block_size", "N", "K"))
    bits = node.attrs.get("bits", 4)
    if bits not in _BITS:
        return  # there is no body
    _require_blocks(width)
    for name, count in (("N", rows), ("K", depth)):
        require(1 <= count <= _MOST, "{} is {}, outside [1, {}]", name, count, _MOST)
    blocks = -(-depth // width)
    packed = -(-blocks * bits // 8)
    require_dtype("B", held, "uint8")
    in_bytes = zeros is not None and zeros.dtype == "uint8"
    counts = {
        "B": (held, rows * blocks * (width * bits // 8)),
        "scales": (scales, rows * blocks),
        "zero_points": (zeros, rows * (packed if in_bytes else blocks)),
        "bias": (bias, rows),
    }
    for name, (given, count) in counts.items():
        require(
            given is None or given.size == count,
            "{} has {} elements; N, K, block_size and bits make it {}",
            name,
            None if given is None else given.size,
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
    """Multiply by weights, of which each row is a column of the product."""
    a, held, scales, zeros, groups, bias = call.inputs
    assert a is not None, "the form says so"
    if call.attribute("weight_prepacked"):
        raise call.unsupported("weight_prepacked=1")
    rows, depth, bits = (call.attribute(name) for name in ("N", "K", "bits"))
    width = call.attribute("block_size")
    _refuse_bits(call, bits)
    blocks = -(-depth // width)
    bytes_of_row = blocks * (width * bits // 8)
    numbers = _unpacked(call, call.Reshape(held, _axes(call, rows, bytes_of_row)), bits)
    factors = call.Reshape(scales, _axes(call, rows, blocks))
    centre: Any = float(1 << (bits - 1))
    dtype = call.dtype(a)
    if zeros is not None and call.dtype(zeros) == "uint8":
        packed = call.Reshape(zeros, _axes(call, rows, -(-blocks * bits // 8)))
        centre = call.cast(_first(call, _unpacked(call, packed, bits), blocks), dtype)
    elif zeros is not None:
        centre = call.cast(call.Reshape(zeros, _axes(call, rows, blocks)), dtype)
    if groups is None:
        block_of: Any = call.constant(np.arange(depth) // width, "int64")
    else:
        call.size(groups, 0)  # without it the reference runs the node: there may be too many
        block_of = _first(call, groups, depth)
    if isinstance(centre, Value):
        centre = call.Gather(centre, block_of, axis=1)
    apart = call.Sub(call.cast(_first(call, numbers, depth), dtype), centre)
    weights = call.Mul(apart, call.Gather(factors, block_of, axis=1))
    product = call.MatMul(a, call.Transpose(weights, perm=(1, 0)))
    return [product if bias is None else call.Add(product, bias, requires="one_row")]


def gather_block_quantized_operands(
    node: Node, data: Tensor, _indices: Tensor, scales: Tensor, zeros: Tensor | None = None
) -> None:
    """Raise ShapeError unless there is a scale, and a zero point, for each block of the table."""
    width, bits = node.attrs.get("block_size", 128), node.attrs.get("bits", 4)
    bits = bits if data.dtype == "uint8" else 8
    if bits not in _BITS:
        return  # there is no body
    require(data.rank >= 1, "the table is a scalar")
    _require_blocks(width)
    along = node.attrs.get("quantize_axis", 1) % data.rank
    together = 8 // bits  # numbers of a byte, along the last axis
    sizes = [*data.shape[:-1], data.shape[-1] * together]
    sizes[along] = -(-sizes[along] // width)
    require_shape("scales", scales, sizes, "one for each block")
    require_dtype("zero_points", zeros, data.dtype)
    sizes[-1] = -(-sizes[-1] // together)
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
    """Pick rows of a table, and make floats of them."""
    data, indices, scales, zeros = call.inputs
    assert data is not None, "the form says so"
    assert indices is not None, "the form says so"
    assert scales is not None, "the form says so"
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
    numbers = call.cast(_unpacked(call, picked[0], bits), dtype)
    axis = along + (call.rank(indices) - 1 if along > of else 0)
    size, width = call.size(numbers, axis), call.attribute("block_size")
    block_of = call.constant(np.arange(size) // width, "int64")
    if zeros is not None:
        centre = call.cast(_unpacked(call, picked[2], bits), dtype)
        numbers = call.Sub(numbers, call.Gather(centre, block_of, axis=axis))
    elif packed:
        numbers = call.Sub(numbers, float(1 << (bits - 1)))
    factors = call.Gather(picked[1], block_of, axis=axis)
    return [call.Mul(numbers, factors, requires="same_shape")]

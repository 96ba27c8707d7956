"""ONNX Runtime's operators on weights of 2, 4 or 8 bits in blocks with a scale each.

The weights become floats once, when a model is compiled: what follows from weights alone is not
computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from subgraph.functions import Call, function
from subgraph.graph import Value

Results = Sequence[Value | None]


def _axes(call: Call, *axes: int) -> Value:
    return call.constant(axes, "int64")


def _unpacked(call: Call, held: Any, bits: int) -> Any:
    """Return the numbers that bytes hold, low bits first, along the last dimension."""
    if bits == 8:
        return held
    if bits not in (2, 4):
        raise call.refuse(f"bits={bits}")
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


@function(
    "MatMulNBits",
    "A, B, scales, zero_points?, g_idx?, bias? -> Y",
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
        raise call.refuse("weight_prepacked=1")
    rows, depth, bits = (call.attribute(name) for name in ("N", "K", "bits"))
    width = call.attribute("block_size")
    blocks = -(-depth // width)
    numbers = _unpacked(call, call.Reshape(held, _axes(call, rows, -1)), bits)
    factors = call.Reshape(scales, _axes(call, rows, blocks))
    centre: Any = float(1 << (bits - 1))
    dtype = call.dtype(a)
    if zeros is not None and call.dtype(zeros) == "uint8":
        packed = call.Reshape(zeros, _axes(call, rows, -1))
        centre = call.cast(_first(call, _unpacked(call, packed, bits), blocks), dtype)
    elif zeros is not None:
        centre = call.cast(call.Reshape(zeros, _axes(call, rows, blocks)), dtype)
    block_of: Any = groups
    if groups is None:
        block_of = _axes(call, *(k // width for k in range(depth)))
    if isinstance(centre, Value):
        centre = call.Gather(centre, block_of, axis=1)
    apart = call.Sub(call.cast(_first(call, numbers, depth), dtype), centre)
    weights = call.Mul(apart, call.Gather(factors, block_of, axis=1))
    product = call.MatMul(a, call.Transpose(weights, perm=(1, 0)))
    return [product if bias is None else call.Add(product, bias)]


@function(
    "GatherBlockQuantized",
    "data, indices, scales, zero_points? -> output",
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
        raise call.refuse("blocks along the axis of the indices, or tables of floats")
    packed = call.dtype(data) == "uint8"
    bits = call.attribute("bits") if packed else 8
    picked = [
        None if x is None else call.Gather(x, indices, axis=of) for x in (data, scales, zeros)
    ]
    numbers = call.cast(_unpacked(call, picked[0], bits), dtype)
    axis = along + (call.rank(indices) - 1 if along > of else 0)
    size, width = call.size(numbers, axis), call.attribute("block_size")
    block_of = _axes(call, *(k // width for k in range(size)))
    if zeros is not None:
        centre = call.cast(_unpacked(call, picked[2], bits), dtype)
        numbers = call.Sub(numbers, call.Gather(centre, block_of, axis=axis))
    elif packed:
        numbers = call.Sub(numbers, float(1 << (bits - 1)))
    return [call.Mul(numbers, call.Gather(picked[1], block_of, axis=axis))]

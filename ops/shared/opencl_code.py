"""OpenCL C that all kernels share: element types, loads and stores, what generated text is made of.

float16 and bfloat16 are computed in float32 and only stored narrow, as on the CPU; that needs no
extension. Booleans are bytes in memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from subgraph.dtypes import DTYPES, HALVES
from subgraph.engine.planner.lowering import Unsupported
from subgraph.graph.graph import Node
from subgraph.graph.types import numpy_dtype
from subgraph.opencl.lowering import ClLowering

_WORDS = {1: "uchar", 2: "ushort", 4: "uint", 8: "ulong"}
FLOATS = ("float32", "float64")


def storage(dtype: str) -> str:
    """Return the C type of an element in memory.

    Raises:
        Unsupported: there is none.
    """
    found = DTYPES[dtype].opencl
    if not found:
        raise Unsupported(f"elements of dtype {dtype} have no OpenCL type")
    return found


def register(dtype: str) -> str:
    """Return the C type in which a dtype is computed."""
    return "float" if dtype in HALVES else storage(dtype)


def word(item: int) -> str:
    """Return the C type as which elements of so many bytes are moved."""
    return _WORDS[item]


def load(dtype: str, pointer: str, index: str) -> str:
    """Return the expression that reads an element."""
    if dtype == "float16":
        return f"vload_half({index}, {pointer})"
    if dtype == "bfloat16":
        return f"from_bfloat16({pointer}[{index}])"
    return f"({pointer}[{index}] != 0)" if dtype == "bool" else f"{pointer}[{index}]"


def store(dtype: str, pointer: str, index: str, value: str) -> str:
    """Return the statement that writes an element."""
    if dtype == "float16":
        return f"vstore_half({value}, {index}, {pointer});"
    if dtype == "bfloat16":
        return f"{pointer}[{index}] = to_bfloat16({value});"
    return f"{pointer}[{index}] = {value};"


BFLOAT16 = """
float from_bfloat16(ushort x) { return as_float((uint)x << 16); }
ushort to_bfloat16(float x) {
  uint bits = as_uint(x);
  if (isnan(x)) return (ushort)((bits >> 16) | 0x40);
  return (ushort)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
"""


def require(low: ClLowering, *dtypes: str) -> None:
    """Check that a device computes in all dtypes; narrow floats are only stored.

    Raises:
        Unsupported: it does not.
    """
    for dtype in dtypes:
        storage(dtype)
        if dtype == "float64":
            low.require(dtype)


def line(low: ClLowering, count: int) -> tuple[tuple[int], tuple[int]]:
    """Return the ranges over ``count`` items; kernels check that an item exists."""
    group = 128 if low.traits.is_gpu else 64
    return (-(-count // group) * group,), (group,)


_ACTIVATIONS = {
    "": "x",
    "Relu": "(x < 0 ? 0 : x)",
    "Clip": "(x < p ? p : x > q ? q : x)",
    "Sigmoid": "(1 / (1 + exp(-x)))",
    "Tanh": "tanh(x)",
    "Gelu": "(x * (T)0.5 * (1 + erf(x * (T)0.70710678118654752440)))",
    "GeluTanh": "(x / (1 + exp((T)-1.5957691216057308 * (x + (T)0.044715 * x * x * x))))",
    "Silu": "(x / (1 + exp(-x)))",
    "Softplus": "(fmax(x, (T)0) + log1p(exp(-fabs(x))))",
    "Mish": "(x * tanh(fmax(x, (T)0) + log1p(exp(-fabs(x)))))",
    "Erf": "erf(x)",
    "HardSwish": "(x * clamp(x / 6 + (T)0.5, (T)0, (T)1))",
    "HardSigmoid": "clamp(x * p + q, (T)0, (T)1)",
    "LeakyRelu": "(x < 0 ? x * p : x)",
    "Elu": "(x < 0 ? p * expm1(x) : x)",
    "Swish": "(x / (1 + exp(-p * x)))",
}


def activation(node: Node) -> tuple[tuple[str, str], float, float]:
    """Return the definition of the activation of a fused node, and its two numbers.

    It is a macro ``ACT(x, p, q)``; the identity for a node without one.

    Raises:
        Unsupported: there is no such activation.
    """
    name = str(node.attrs.get("activation", ""))
    if name not in _ACTIVATIONS:
        raise Unsupported(f"activation {name} has no OpenCL form")
    numbers = (float(node.attrs.get(f"activation_{k}", 0.0)) for k in ("alpha", "beta"))
    low, high = numbers
    return ("ACT(x, p, q)", _ACTIVATIONS[name]), low, high


def number(dtype: str, value: float) -> np.generic[Any]:
    """Return a number as an argument of the dtype."""
    scalar: np.generic[Any] = numpy_dtype("float32" if dtype in HALVES else dtype).type(value)
    return scalar

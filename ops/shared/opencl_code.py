"""OpenCL C that all families share: types of elements, loads and stores, activations.

float16 and bfloat16 are only stored as such and computed in float32, as on the CPU, which needs no
extension of OpenCL. Booleans are bytes in memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from subgraph.dtypes import DTYPES, HALF_FLOATS
from subgraph.engine.planner.lowering import Unsupported
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.graph.types import numpy_dtype
from subgraph.opencl.lowering import ClLowering
from subgraph.opencl.runtime import ClSource, definitions

from .activations import ACTIVATIONS, stated_activation

_WORDS = {1: "uchar", 2: "ushort", 4: "uint", 8: "ulong"}


def program(name: str, /, **macros: str | int) -> ClSource:
    """Return the program of the file ``ops/<name>.cl`` with these macros."""
    return ClSource(name, defines=definitions(macros))


def variant_of(kernel: Kernel) -> dict[str, Any]:
    """Return the arguments of a kernel's factory, by name."""
    return dict(kernel.variant)


def storage(dtype: str) -> str:
    """Return the C type of an element in memory.

    Raises:
        Unsupported: OpenCL C has no type for the dtype.
    """
    found = DTYPES[dtype].opencl
    if not found:
        raise Unsupported(f"elements of dtype {dtype} have no OpenCL type")
    return found


def register(dtype: str) -> str:
    """Return the C type in which a dtype is computed."""
    return "float" if dtype in HALF_FLOATS else storage(dtype)


def word(item: int) -> str:
    """Return the unsigned C type of ``item`` bytes, with which elements of that size are moved."""
    return _WORDS[item]


def load(dtype: str, pointer: str, index: str) -> str:
    """Return the C expression that reads an element.

    Args:
        dtype: Dtype of the elements in memory.
        pointer: C expression of the first element's address.
        index: C expression of the element's index.
    """
    if dtype == "float16":
        return f"vload_half({index}, {pointer})"
    if dtype == "bfloat16":
        return f"from_bfloat16({pointer}[{index}])"
    return f"({pointer}[{index}] != 0)" if dtype == "bool" else f"{pointer}[{index}]"


def store(dtype: str, pointer: str, index: str, value: str) -> str:
    """Return the C statement that writes an element.

    Args:
        dtype: Dtype of the elements in memory.
        pointer: C expression of the first element's address.
        index: C expression of the element's index.
        value: C expression of the value, of the type `register` returns.
    """
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
    """Require that the device can compute in all dtypes.

    Raises:
        Unsupported: A dtype has no OpenCL type, or is float64 and the device has none.
    """
    for dtype in dtypes:
        storage(dtype)
        if dtype == "float64":
            low.require(dtype)


def line(low: ClLowering, count: int) -> tuple[tuple[int], tuple[int]]:
    """Return the global and the local size for ``count`` work-items.

    The global size is rounded up to whole work-groups; kernels ignore work-items from count on.
    """
    group = 128 if low.traits.is_gpu else 64
    # OpenCL 1.2 requires a global size that is a multiple of the local one.
    return (-(-count // group) * group,), (group,)


def activation(node: Node) -> tuple[tuple[str, str], float, float]:
    """Return the activation of a fused node.

    Returns:
        Name and body of the macro ``ACT(x, p, q)`` (the identity for a node without activation),
        and its parameters p and q.

    Raises:
        Unsupported: The activation has no OpenCL form.
    """
    name, p, q = stated_activation(node)
    if name and name not in ACTIVATIONS:
        raise Unsupported(f"activation {name} has no OpenCL form")
    return ("ACT(x, p, q)", ACTIVATIONS[name].opencl if name else "x"), p, q


def number(dtype: str, value: float) -> np.generic[Any]:
    """Return a number as a kernel argument of the type in which the dtype is computed."""
    scalar: np.generic[Any] = numpy_dtype("float32" if dtype in HALF_FLOATS else dtype).type(value)
    return scalar

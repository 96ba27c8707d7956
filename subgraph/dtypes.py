"""Element types of tensors: the table of their names, numbers and sizes.

A dtype is a string, ONNX's name in lower case as NumPy and ml_dtypes spell it ("float32",
"bfloat16", "float8_e4m3fn", "int4", "string", ...). Other tables of dtypes derive from `DTYPES`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal, NamedTuple

Kind = Literal["float", "int", "uint", "bool", "complex", "string"]


class ElementType(NamedTuple):
    """An element type.

    Attributes:
        number: ONNX's TensorProto.DataType.
        kind: Kind of the elements.
        bits: Bits of an element in a file, 0 for strings; in memory it takes whole bytes.
        opencl: Type in OpenCL C of an element in memory; "" if kernels do not support it.
    """

    number: int
    kind: Kind
    bits: int
    opencl: str = ""


DTYPES = MappingProxyType(
    {
        "float32": ElementType(1, "float", 32, "float"),
        "uint8": ElementType(2, "uint", 8, "uchar"),
        "int8": ElementType(3, "int", 8, "char"),
        "uint16": ElementType(4, "uint", 16, "ushort"),
        "int16": ElementType(5, "int", 16, "short"),
        "int32": ElementType(6, "int", 32, "int"),
        "int64": ElementType(7, "int", 64, "long"),
        "string": ElementType(8, "string", 0),
        "bool": ElementType(9, "bool", 8, "uchar"),
        "float16": ElementType(10, "float", 16, "half"),
        "float64": ElementType(11, "float", 64, "double"),
        "uint32": ElementType(12, "uint", 32, "uint"),
        "uint64": ElementType(13, "uint", 64, "ulong"),
        "complex64": ElementType(14, "complex", 64),
        "complex128": ElementType(15, "complex", 128),
        "bfloat16": ElementType(16, "float", 16, "ushort"),
        "float8_e4m3fn": ElementType(17, "float", 8),
        "float8_e4m3fnuz": ElementType(18, "float", 8),
        "float8_e5m2": ElementType(19, "float", 8),
        "float8_e5m2fnuz": ElementType(20, "float", 8),
        "uint4": ElementType(21, "uint", 4),
        "int4": ElementType(22, "int", 4),
        "float4_e2m1fn": ElementType(23, "float", 4),
        "float8_e8m0fnu": ElementType(24, "float", 8),
        "uint2": ElementType(25, "uint", 2),
        "int2": ElementType(26, "int", 2),
        "float6_e2m3fn": ElementType(27, "float", 6),
        "float6_e3m2fn": ElementType(28, "float", 6),
    }
)
ONNX_DTYPE = MappingProxyType({name: each.number for name, each in DTYPES.items()})
DTYPE_OF_ONNX = MappingProxyType({number: name for name, number in ONNX_DTYPE.items()})
# The floating-point types of kernels; they compute the 16-bit types in float32.
HALF_FLOATS = ("float16", "bfloat16")
FLOATS = ("float32", "float64", *HALF_FLOATS)
# The integer types of kernels, and the unsigned ones by their bytes, as which elements of any type
# are moved.
INTEGERS = tuple(n for n, each in DTYPES.items() if each.kind in ("int", "uint") and each.bits >= 8)
UNSIGNED = MappingProxyType({DTYPES[n].bits // 8: n for n in INTEGERS if DTYPES[n].kind == "uint"})
# Types whose bytes in a file differ from an array's: sub-byte elements, which are packed; strings.
NOT_RAW = frozenset(name for name, each in DTYPES.items() if each.bits < 8)


def compute_dtype(dtype: str) -> str:
    """Return the dtype in which kernels compute elements that are stored as ``dtype``."""
    return "float32" if dtype in HALF_FLOATS else dtype


def item_bytes(dtype: str) -> int:
    """Return the bytes of an element in memory; 0 for a string, which is a Python object."""
    return -(-DTYPES[dtype].bits // 8)

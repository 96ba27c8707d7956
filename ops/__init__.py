"""Operators: ``ops.<Operator>`` for every operator of ONNX, and one folder for each family of them.

A family's ``op.py`` declares its operators, ``reference.py`` computes what onnx.reference lacks or
gets wrong, ``cpu.py`` says how the CPU device runs the family, ``kernels.py`` holds its kernels,
``opencl.py`` and ``kernels.cl`` the same for OPENCL. Registries find the files by these names, and
by names with these endings (``transpose_cpu.py``); there is no list of files.

Operators of the domain "subgraph.cpu" are written by passes only. A fused one has the original
nodes as its inner graph, which is its definition: the reference runs it, and types are inferred
through it. Trailing inputs may be missing; a missing one in the middle is None.
"""

from functools import cache

if __name__ != "subgraph.ops":
    raise ImportError("this folder is the package subgraph.ops: pip install -e . and use that name")

from subgraph.errors import UnsupportedOpError
from subgraph.operators.builder import Builder, operator


@cache
def _operator(name: str) -> Builder:
    from subgraph.operators.schema import CONTRIBUTED, CUSTOM_SCHEMAS, MICROSOFT, standard_operators

    # Sorted, so that ONNX's own domain "" comes before ai.onnx.ml and the like.
    standard = (of for op_type, of in standard_operators() if op_type == name)
    custom = (of for of, op_type in CUSTOM_SCHEMAS if op_type == name)
    domain = next(custom, next(standard, None))
    if domain is None:
        domain = MICROSOFT if f"{MICROSOFT}::{name}" in CONTRIBUTED else ""
    return operator(name, domain)


def __getattr__(name: str) -> Builder:
    if name.startswith("_"):
        raise AttributeError(f"module 'subgraph.ops' has no attribute {name!r}")
    try:
        return _operator(name)
    except UnsupportedOpError as error:
        raise AttributeError(str(error)) from error


def __dir__() -> list[str]:
    from subgraph.operators.schema import standard_operators

    return sorted({name for name, _ in standard_operators()})

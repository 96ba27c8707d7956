"""Operators: ``ops.<Operator>`` for every operator of ONNX, and one folder for each family of them.

A custom operator has that form too, if its name is in one domain alone and is none of the standard;
``ops.operator(name, domain)`` is any other.

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

_builder = cache(operator)  # one function for each operator


@cache
def _standard_domains() -> dict[str, str]:
    """Return the domain of each operator of the standard; ONNX's own comes before the others."""
    from subgraph.operators.schema import standard_operators

    return dict(reversed(standard_operators()))  # sorted, so that the first of a name is the last


def _domain_of(name: str) -> str:
    """Return the domain of the operator that ``ops.<name>`` means; "" if there is none.

    Raises:
        UnsupportedOpError: several domains have an operator of that name, and the standard none.
    """
    from subgraph.operators.schema import domains_of

    standard = _standard_domains().get(name)
    if standard is not None:
        return standard
    domains = domains_of(name)
    if len(domains) > 1:
        calls = " or ".join(f"ops.operator({name!r}, {domain!r})" for domain in domains)
        raise UnsupportedOpError(f"operator {name!r} is in {len(domains)} domains: write {calls}")
    return domains[0] if domains else ""


def __getattr__(name: str) -> Builder:
    if name.startswith("_"):
        raise AttributeError(f"module 'subgraph.ops' has no attribute {name!r}")
    try:
        return _builder(name, _domain_of(name))
    except UnsupportedOpError as error:
        raise AttributeError(str(error)) from error


def __dir__() -> list[str]:
    from subgraph.operators.schema import standard_operators

    return sorted({name for name, _ in standard_operators()})

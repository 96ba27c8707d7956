"""Passes, functions from graph to graph: one file each in a folder of its kind.

``passes.register_pass`` and ``passes.apply_pass`` are the whole interface; every registered pass is
also an attribute here by its name (``passes.DeadCodeElimination``).
"""

if __name__ != "subgraph.passes":
    raise ImportError(
        "this folder is the package subgraph.passes: pip install -e . and use that name"
    )

from subgraph.transform.pass_manager import (
    PASSES,
    Checks,
    Diff,
    Hooks,
    Instrument,
    Pass,
    PassTime,
    Printing,
    Timing,
    apply_pass,
    register_pass,
)

__all__ = [
    "Checks",
    "Diff",
    "Hooks",
    "Instrument",
    "Pass",
    "PassTime",
    "Printing",
    "Timing",
    "apply_pass",
    "register_pass",
]


def __getattr__(name: str) -> Pass:
    # Names of passes start in upper case; a lookup of a submodule must not load all passes.
    if name[:1].isupper() and name in PASSES:
        return PASSES.get(name)
    raise AttributeError(f"module 'subgraph.passes' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *PASSES.names()})

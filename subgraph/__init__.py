"""Subgraph: bring your accelerator to any ONNX model, in Python.

Everything that users call is here; names load when they are first used, so that importing the
package takes neither numba nor pyopencl nor onnx.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from subgraph._version import __version__

if TYPE_CHECKING:
    from subgraph import ops, passes, testing
    from subgraph.builder import capture, input, parameter
    from subgraph.errors import (
        BlobError,
        ConfigError,
        DeviceError,
        MissingInputError,
        ModelError,
        PartitionError,
        PassError,
        RequestCancelledError,
        RequestError,
        ShapeError,
        SubgraphError,
        UnsupportedOpError,
    )
    from subgraph.graph import Graph, Node, Value
    from subgraph.op import Operator
    from subgraph.parameters import Parameter, transaction
    from subgraph.schema import Attribute, Schema
    from subgraph.types import MapType, OptionalType, SequenceType, SparseTensorType, TensorType

_HOME = {
    "subgraph.builder": ("capture", "input", "parameter"),
    "subgraph.errors": (
        "BlobError",
        "ConfigError",
        "DeviceError",
        "MissingInputError",
        "ModelError",
        "PartitionError",
        "PassError",
        "RequestCancelledError",
        "RequestError",
        "ShapeError",
        "SubgraphError",
        "UnsupportedOpError",
    ),
    "subgraph.graph": ("Graph", "Node", "Value"),
    "subgraph.op": ("Operator",),
    "subgraph.parameters": ("Parameter", "transaction"),
    "subgraph.schema": ("Attribute", "Schema"),
    "subgraph.types": (
        "MapType",
        "OptionalType",
        "SequenceType",
        "SparseTensorType",
        "TensorType",
    ),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
_SUBMODULES = ("ops", "passes", "testing")

__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    "__version__",
    *_SUBMODULES,
    *_MODULE_OF,
]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"subgraph.{name}")
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'subgraph' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

"""ONNX's protobuf classes without the rest of the onnx package, whose import takes far longer.

The package has them in a file of their own, which needs only protobuf. Protobuf makes one class of
a message type however often its description is loaded, so these are the package's own classes.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

_FILE = "onnx_ml_pb2"


def _load() -> Any:
    """Return the module of the classes, or the onnx package if it is loaded or has no such file."""
    spec = None if "onnx" in sys.modules else find_spec("onnx")
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).with_name(f"{_FILE}.py")
        found = spec_from_file_location(f"{__name__}.{_FILE}", path) if path.is_file() else None
        if found is not None and found.loader is not None:
            module = module_from_spec(found)
            found.loader.exec_module(module)
            return module
    import onnx

    return onnx


if TYPE_CHECKING:
    from onnx import (
        AttributeProto,
        FunctionProto,
        GraphProto,
        ModelProto,
        NodeProto,
        OperatorSetIdProto,
        SparseTensorProto,
        StringStringEntryProto,
        TensorProto,
        TypeProto,
    )

    IR_VERSION: int

__all__ = [
    "IR_VERSION",
    "AttributeProto",
    "FunctionProto",
    "GraphProto",
    "ModelProto",
    "NodeProto",
    "OperatorSetIdProto",
    "SparseTensorProto",
    "StringStringEntryProto",
    "TensorProto",
    "TypeProto",
]

if not TYPE_CHECKING:
    _messages = _load()
    globals().update({name: getattr(_messages, name) for name in __all__})

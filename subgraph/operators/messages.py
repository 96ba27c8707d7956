"""ONNX's protobuf classes without the rest of the onnx package, whose import takes far longer.

The package has them in a file of their own, which needs only protobuf. Protobuf makes one class of
a message type however often its description is loaded, so these are the package's own classes.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

_FILE = "onnx_ml_pb2"


@cache
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
    from onnx import AttributeProto as AttributeProto
    from onnx import FunctionProto as FunctionProto
    from onnx import GraphProto as GraphProto
    from onnx import ModelProto as ModelProto
    from onnx import NodeProto as NodeProto
    from onnx import OperatorSetIdProto as OperatorSetIdProto
    from onnx import SparseTensorProto as SparseTensorProto
    from onnx import StringStringEntryProto as StringStringEntryProto
    from onnx import TensorProto as TensorProto
    from onnx import TypeProto as TypeProto

    IR_VERSION: int
else:

    def __getattr__(name: str) -> Any:
        return getattr(_load(), name)

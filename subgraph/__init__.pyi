# The public names and their homes; lazy_loader reads this file at import.
from . import ops, passes, testing
from ._version import __version__
from .builder import capture, input, parameter
from .errors import (
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
from .graph import Graph, Node, Value
from .op import Operator
from .parameters import Parameter, transaction
from .schema import Attribute, Schema
from .types import MapType, OptionalType, SequenceType, SparseTensorType, TensorType

__all__ = [
    "Attribute",
    "BlobError",
    "ConfigError",
    "DeviceError",
    "Graph",
    "MapType",
    "MissingInputError",
    "ModelError",
    "Node",
    "Operator",
    "OptionalType",
    "Parameter",
    "PartitionError",
    "PassError",
    "RequestCancelledError",
    "RequestError",
    "Schema",
    "SequenceType",
    "ShapeError",
    "SparseTensorType",
    "SubgraphError",
    "TensorType",
    "UnsupportedOpError",
    "Value",
    "__version__",
    "capture",
    "input",
    "ops",
    "parameter",
    "passes",
    "testing",
    "transaction",
]

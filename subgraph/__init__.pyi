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
from .subgraph_op import (
    DefaultSubgraphOp,
    ProfileEntry,
    Session,
    SubgraphOp,
    subgraph_node,
)
from .types import MapType, OptionalType, SequenceType, SparseTensorType, TensorType
from .weights import (
    WeightCache,
    WeightStats,
    weight_stats,
)

__all__ = [
    "Attribute",
    "BlobError",
    "ConfigError",
    "DefaultSubgraphOp",
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
    "ProfileEntry",
    "RequestCancelledError",
    "RequestError",
    "Schema",
    "SequenceType",
    "Session",
    "ShapeError",
    "SparseTensorType",
    "SubgraphError",
    "SubgraphOp",
    "TensorType",
    "UnsupportedOpError",
    "Value",
    "WeightCache",
    "WeightStats",
    "__version__",
    "capture",
    "input",
    "ops",
    "parameter",
    "passes",
    "subgraph_node",
    "testing",
    "transaction",
    "weight_stats",
]

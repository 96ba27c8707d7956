# The public names and their homes; lazy_loader reads this file at import.
from . import ops, passes, testing
from ._version import __version__
from .builder import capture, input, parameter
from .compiled_model import (
    CompiledModel,
)
from .core import (
    Core,
    compile_model,
    default_core,
    import_model,
    query_model,
)
from .device import (
    Device,
    QueryResult,
)
from .errors import (
    BlobError,
    ConfigError,
    DeviceError,
    FileError,
    InternalError,
    LimitError,
    MissingFileError,
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
from .executor import (
    Executor,
)
from .explanation import Explanation, explain
from .graph import Graph, Node, Value
from .infer_request import (
    InferQueue,
    InferRequest,
)
from .onnx_file import (
    load,
    save,
    to_onnx,
)
from .op import Operator
from .parameters import Parameter, transaction
from .preprocessing import (
    Preprocess,
)
from .property import SubgraphProperty, optimize_for, register_property
from .regions import inline_subgraphs, region_model
from .schema import Attribute, Schema
from .selector import ContainOpSelector, Reject, SubgraphSelector, register_selector
from .settings import (
    DeviceOptions,
    option,
)
from .signature import (
    Port,
    Results,
)
from .subgraph_op import (
    DefaultSubgraphOp,
    ProfileEntry,
    Session,
    SubgraphOp,
    subgraph_node,
)
from .text import (
    print_graph,
)
from .text_parser import (
    parse,
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
    "CompiledModel",
    "ConfigError",
    "ContainOpSelector",
    "Core",
    "DefaultSubgraphOp",
    "Device",
    "DeviceError",
    "DeviceOptions",
    "Executor",
    "Explanation",
    "FileError",
    "Graph",
    "InferQueue",
    "InferRequest",
    "InternalError",
    "LimitError",
    "MapType",
    "MissingFileError",
    "MissingInputError",
    "ModelError",
    "Node",
    "Operator",
    "OptionalType",
    "Parameter",
    "PartitionError",
    "PassError",
    "Port",
    "Preprocess",
    "ProfileEntry",
    "QueryResult",
    "Reject",
    "RequestCancelledError",
    "RequestError",
    "Results",
    "Schema",
    "SequenceType",
    "Session",
    "ShapeError",
    "SparseTensorType",
    "SubgraphError",
    "SubgraphOp",
    "SubgraphProperty",
    "SubgraphSelector",
    "TensorType",
    "UnsupportedOpError",
    "Value",
    "WeightCache",
    "WeightStats",
    "__version__",
    "capture",
    "compile_model",
    "default_core",
    "explain",
    "import_model",
    "inline_subgraphs",
    "input",
    "load",
    "ops",
    "optimize_for",
    "option",
    "parameter",
    "parse",
    "passes",
    "print_graph",
    "query_model",
    "region_model",
    "register_property",
    "register_selector",
    "save",
    "subgraph_node",
    "testing",
    "to_onnx",
    "transaction",
    "weight_stats",
]

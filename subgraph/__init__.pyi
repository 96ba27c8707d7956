# The public names and their homes; lazy_loader reads this file at import.
from . import ops, passes, testing
from ._version import __version__
from .devices.backends.property import BackendState, backends
from .devices.core import Core
from .devices.default_core import (
    compile_model,
    default_core,
    get_versions,
    import_model,
    query_model,
)
from .devices.device import Device
from .devices.query import QueryResult
from .engine.toolchain.toolchain import CompileEvent, watch_compilation
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
from .frontends.pytorch import from_torch, torch_backend
from .graph.graph import Graph, Node, Value
from .graph.parameters import Parameter, transaction
from .graph.types import MapType, OptionalType, SequenceType, SparseTensorType, TensorType
from .onnx_format.file import load, save, to_onnx
from .operators.builder import capture, input, parameter
from .operators.operator import Operator
from .operators.schema import Attribute, Schema
from .operators.subgraph_op import (
    DefaultSubgraphOp,
    ProfileEntry,
    Session,
    SubgraphOp,
    subgraph_node,
)
from .partition.explanation import Explanation, explain
from .partition.property import (
    SubgraphProperty,
    list_properties,
    optimize_for,
    register_property,
)
from .partition.regions import inline_subgraphs, region_model
from .partition.selector import (
    ContainOpSelector,
    Reject,
    SubgraphSelector,
    list_selectors,
    register_selector,
)
from .passes.shapes.reshape_inputs import reshape
from .runtime.compiled_model import CompiledModel
from .runtime.executor import Executor
from .runtime.infer_queue import InferQueue
from .runtime.infer_request import InferRequest
from .runtime.preprocessing import Preprocess
from .runtime.request_state import RequestState
from .runtime.runner import Runner, Stage
from .runtime.settings import DeviceOptions, option
from .runtime.signature import Port, Results
from .runtime.task_executor import TaskExecutor
from .text_form.parser import parse
from .text_form.writer import print_graph
from .visualization.visualize import Visualization, visualize
from .weights.cache import WeightCache, WeightStats, weight_stats

__all__ = [
    "Attribute",
    "BackendState",
    "BlobError",
    "CompileEvent",
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
    "RequestState",
    "Results",
    "Runner",
    "Schema",
    "SequenceType",
    "Session",
    "ShapeError",
    "SparseTensorType",
    "Stage",
    "SubgraphError",
    "SubgraphOp",
    "SubgraphProperty",
    "SubgraphSelector",
    "TaskExecutor",
    "TensorType",
    "UnsupportedOpError",
    "Value",
    "Visualization",
    "WeightCache",
    "WeightStats",
    "__version__",
    "backends",
    "capture",
    "compile_model",
    "default_core",
    "explain",
    "from_torch",
    "get_versions",
    "import_model",
    "inline_subgraphs",
    "input",
    "list_properties",
    "list_selectors",
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
    "reshape",
    "save",
    "subgraph_node",
    "testing",
    "to_onnx",
    "torch_backend",
    "transaction",
    "visualize",
    "watch_compilation",
    "weight_stats",
]

# The part of ONNX Runtime that tests and benchmarks use.
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

class GraphOptimizationLevel(Enum):
    ORT_DISABLE_ALL = ...
    ORT_ENABLE_BASIC = ...
    ORT_ENABLE_EXTENDED = ...
    ORT_ENABLE_ALL = ...

class SessionOptions:
    intra_op_num_threads: int
    inter_op_num_threads: int
    log_severity_level: int
    graph_optimization_level: GraphOptimizationLevel

class NodeArg:
    name: str
    shape: list[Any]
    type: str

class InferenceSession:
    def __init__(
        self,
        path_or_bytes: str | bytes,
        sess_options: SessionOptions | None = ...,
        providers: Sequence[str] | None = ...,
    ) -> None: ...
    def get_inputs(self) -> list[NodeArg]: ...
    def get_outputs(self) -> list[NodeArg]: ...
    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]
    ) -> list[Any]: ...

def set_default_logger_severity(severity: int) -> None: ...

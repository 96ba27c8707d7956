"""ONNXRUNTIME: regions run by ONNX Runtime, on any of its execution providers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from subgraph.devices.backends.base import Backend, BackendOptions, LibraryModel
from subgraph.devices.backends.operand_checks import depends_on_scales, has_input
from subgraph.errors import ConfigError
from subgraph.graph.graph import Node
from subgraph.graph.types import Array, TensorType
from subgraph.runtime.settings import option


@attrs.frozen
class OnnxruntimeOptions(BackendOptions):
    """Options of ONNXRUNTIME."""

    PROVIDERS: str = option(
        "CPUExecutionProvider",
        "execution providers in order of priority, separated by commas",
    )
    SPINNING: bool = option(
        False, "let idle threads of the library spin, which slows other devices of the process"
    )


class OnnxruntimeDevice(Backend):
    """Runs regions by sessions of ONNX Runtime."""

    options_class = OnnxruntimeOptions
    module = "onnxruntime"
    requirement = "onnxruntime >= 1.24.1"
    title = "ONNX Runtime"
    checks_operands = True
    writes_outputs = False
    dtypes = frozenset(
        {
            *("bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64"),
            *("string", "uint8", "uint16", "uint32", "uint64"),
        }
    )

    def refusal(self, node: Node) -> str:
        """Refuse a form of an operator that ONNX Runtime computes otherwise, or cannot run."""
        differs = _DIFFERENT.get(node.op_type)
        if differs is None or node.domain or not differs(node):
            return ""
        return f"ONNX Runtime computes this form of {node.op_type} otherwise than ONNX"

    def compile_library_model(self, model: bytes, options: Any) -> LibraryModel:
        """Return a session; the library optimizes the model for the provider."""
        library: Any = self.library
        settings = library.SessionOptions()
        settings.log_severity_level = 4  # errors come as exceptions
        settings.intra_op_num_threads = options.INFERENCE_NUM_THREADS
        settings.inter_op_num_threads = 1
        spinning = "1" if options.SPINNING else "0"
        settings.add_session_config_entry("session.intra_op.allow_spinning", spinning)
        providers = [name.strip() for name in options.PROVIDERS.split(",") if name.strip()]
        known = library.get_available_providers()
        if not providers or not set(providers) <= set(known):
            raise ConfigError(
                f"device {self.name}: PROVIDERS is {options.PROVIDERS!r}; this build of ONNX "
                f"Runtime has {', '.join(known)}"
            )
        return _SessionModel(library.InferenceSession(model, settings, providers=providers))

    def metrics(self) -> dict[str, Any]:
        """Return the metrics; PROVIDERS_AVAILABLE lists what the installed build has."""
        library: Any = self.library
        available = ",".join(library.get_available_providers())
        return {**super().metrics(), "PROVIDERS_AVAILABLE": available}


class _SessionModel:
    """A session, which several threads may run at the same time."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._inputs = [port.name for port in session.get_inputs()]
        self._outputs = [port.name for port in session.get_outputs()]

    def runner(self) -> Callable[[Sequence[Array], Sequence[Array | None]], Sequence[Array]]:
        run, inputs, outputs = self._session.run, self._inputs, self._outputs

        def call(arrays: Sequence[Array], into: Sequence[Array | None]) -> Sequence[Array]:
            found: Sequence[Array] = run(outputs, dict(zip(inputs, arrays, strict=True)))
            return found

        return call


def _type(node: Node, position: int) -> TensorType:
    """Return the type of an input; a query has refused nodes without one."""
    value = node.inputs[position]
    assert value is not None
    assert isinstance(value.type, TensorType)
    return value.type


def _attends_otherwise(node: Node) -> bool:
    """Return whether float16 loses digits, scores lack the causal mask, or a run fails.

    It does with a mask of fewer columns than there are keys, or a past without its output.
    """
    if _type(node, 0).dtype == "float16" or (has_input(node, 4) and len(node.outputs) < 3):
        return True
    masked = bool(node.attrs.get("is_causal", 0)) and len(node.outputs) > 3
    if masked and node.attrs.get("qk_matmul_output_mode", 0) == 2:
        return True
    if not has_input(node, 3):
        return False
    lengths = [(_type(node, k).shape or ())[-2:-1] for k in (1, 4) if has_input(node, k)]
    sizes = [*(_type(node, 3).shape or ())[-1:], *(n for length in lengths for n in length)]
    known = [n for n in sizes if isinstance(n, int)]
    return len(known) == len(sizes) and known[0] != sum(known[1:])


# By operator: whether ONNX Runtime 1.32 computes a node otherwise, or ends with an error.
_DIFFERENT: dict[str, Callable[[Node], bool]] = {
    "Attention": _attends_otherwise,
    "ConvInteger": lambda node: has_input(node, 3) and _type(node, 3).shape not in ((), (1,)),
    "DFT": lambda _: True,  # loses digits, as STFT does
    "MaxUnpool": lambda node: has_input(node, 2),
    "Range": lambda node: any(_type(node, k).shape != () for k in range(3)),
    **dict.fromkeys(("ReduceMax", "ReduceMin"), lambda node: _type(node, 0).dtype == "bool"),
    "Resize": depends_on_scales,
    "STFT": lambda _: True,
}

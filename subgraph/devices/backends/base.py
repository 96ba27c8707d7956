"""`Backend`: the base class of devices over other libraries.

A backend passes each region as an ONNX model to its library. A child names the library's package
and implements compilation and runs of a model; this class handles queries, versions of weights, new
shapes, output memory and errors.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar, Protocol

import attrs
import numpy as np

from subgraph.devices.backends.operand_checks import (
    OperandChecks,
    computed_elements,
    has_computed_sizes,
    has_whole_scales,
    pools_nothing,
)
from subgraph.devices.device import Device
from subgraph.devices.model_input import static_form
from subgraph.devices.query import PreparedGraph
from subgraph.errors import ConfigError, DeviceError, ModelError, SubgraphError, message_of
from subgraph.graph.graph import Graph, Node, Value, copy_nodes
from subgraph.graph.parameters import Parameter
from subgraph.graph.result_arrays import fill_outputs
from subgraph.graph.types import DTYPE_OF_ONNX, ONNX_DTYPE, Array, TensorType, numpy_dtype
from subgraph.operators.operator import is_random
from subgraph.operators.subgraph_op import (
    DefaultSubgraphOp,
    ExportFile,
    Session,
    SubgraphOp,
)
from subgraph.partition.replace import Cutter
from subgraph.partition.selector import Reject
from subgraph.runtime.executor_plan import all_parameters
from subgraph.runtime.settings import DeviceOptions, option
from subgraph.system.forking import finished_before_fork
from subgraph.transform.pass_manager import apply_pass
from subgraph.weights.cache import WeightEntry

# Larger weights are zeros of their shape in the models of a query: whether a library
# compiles a model depends on values only for small operands, such as axes and sizes. An estimate.
_SMALL_WEIGHT_BYTES = 1 << 12
# Fields of a TensorProto for its elements.
_DATA_FIELDS = frozenset(
    f"{kind}_data" for kind in ("raw", "float", "double", "int32", "int64", "uint64", "string")
)
_numbers = itertools.count()  # number the regions, for keys of the weight cache


@attrs.frozen
class BackendOptions(DeviceOptions):
    """Options that every backend has."""

    INFERENCE_NUM_THREADS: int = option(
        0,
        "threads that the library may use for a run; 0: its own choice",
        minimum=0,
        maximum=1024,
    )
    WEIGHTS: str = option(
        "inside",
        "'inside' compiles weights into the model, which is compiled again for new values; "
        "'inputs' passes them at every run",
        values=("inside", "inputs"),
    )


class LibraryModel(Protocol):
    """A model that a library has compiled; several requests use it at the same time."""

    def runner(self) -> Callable[[Sequence[Array], Sequence[Array | None]], Sequence[Array]]:
        """Return a function that runs the model; one thread at a time calls it.

        Its arguments are one C-contiguous array for each input of the model, and for each output an
        array to write into or None. It returns one array for each output, which the caller owns.
        """
        ...


class Backend(Device):
    """A device over another library.

    Attributes:
        module: Name of the library's Python module.
        requirement: Requirement for pip, such as "onnxruntime >= 1.24.1".
        title: Name of the library in messages.
        dtypes: Dtypes of tensors that the library computes as ONNX defines them.
        checks_operands: Whether the library checks sizes and indices itself at every run, with all
            options (`trusts`). If not, they are checked before, and nodes for which that is
            impossible are refused.
        empty_tensors: Whether the library runs on inputs without elements; if not, the default
            executor makes such runs.
        passes_weights: Whether weights may be inputs of the library's model.
        writes_outputs: Whether a runner writes into arrays of the caller; if not, it gets none.
        library: The imported module, once the device has started.
    """

    options_class = BackendOptions
    fallback = ("CPU", "REFERENCE")
    module: ClassVar[str]
    requirement: ClassVar[str]
    title: ClassVar[str]
    dtypes: ClassVar[frozenset[str]]
    checks_operands: ClassVar[bool] = False
    empty_tensors: ClassVar[bool] = True
    passes_weights: ClassVar[bool] = True
    writes_outputs: ClassVar[bool] = True
    library: Any

    # ------------------------------------------------------------------ overridden by children

    @abstractmethod
    def compile_library_model(self, model: bytes, options: Any) -> LibraryModel:
        """Compile a serialized ONNX model.

        Args:
            model: The model; its opset versions are those of the user's model.
            options: The device's options.

        Raises:
            Exception: the library refuses the model; the text becomes the reason.
        """

    def try_library_model(self, model: bytes, options: Any) -> None:
        """Raise the library's exception if it refuses a model.

        The default compiles the model; a child overrides it if its library has a faster check.
        """
        self.compile_library_model(model, options)

    def refusal(self, node: Node) -> str:
        """Return why a node must not run on the library even if it compiles; "" if it may."""
        return ""

    def trusts(self, options: Any) -> bool:
        """Return whether the library checks operands itself with these options.

        The default is ``checks_operands``; a child overrides it if that depends on an option.
        """
        return self.checks_operands

    # ------------------------------------------------------------------ called by Device

    def load(self) -> Any:
        """Return the library; a child overrides this if the library is no Python module.

        Raises:
            ImportError: the library is missing or cannot be loaded.
        """
        return importlib.import_module(self.module)

    def start(self) -> None:
        """Import the library.

        Raises:
            DeviceError: the package is missing or too old; the message says what to install.
        """
        self.library = import_library(self.module, self.requirement, self.title, self.load)
        self._answers: dict[bytes, str] = {}  # by `_key`: why a model is refused, "" if it is not

    def transform(self, graph: Graph, options: Any) -> Graph:
        """Return the graph with the types of its values, which a library is asked with."""
        typed = all(value.type is not None for value in graph.values())
        return graph if typed else apply_pass(graph, "InferTypes")

    def _prepare(self, graph: Graph, options: Any) -> PreparedGraph:
        """Ask the library about all nodes together first, and about each alone if it refuses."""
        graph = self._transformed(graph, options)
        refused = {n.name: text for n in graph.nodes if (text := self._static_refusal(n, options))}
        nodes = [n for n in graph.nodes if n.name not in refused and not self._own_op_reason(n)]
        piece = Cutter(graph).cut_out(nodes, graph.name) if len(nodes) > 1 else None
        try:
            written = None if piece is None else _serialized(piece.inner, _if_small)
        except ModelError as error:  # of versions that no opset has together
            return PreparedGraph(graph, {**refused, **{n.name: str(error) for n in nodes}})
        together = written is not None and not self._answer(written, options)
        for node in nodes:
            model = _single_node_model(node)
            if together:
                self._answers[_key(model, options)] = ""
            elif text := self._answer(model, options):
                refused[node.name] = text
        if not self.trusts(options):
            for node in nodes:
                computed = computed_elements(node) if node.name not in refused else ()
                refused.update(
                    (node.name, self._unchecked(value))
                    for value in computed
                    if value.producer is not None and value.producer.name not in refused
                )
        return PreparedGraph(graph, refused)

    def supports(self, node: Node, options: Any) -> bool | Reject:
        """Return whether the library compiles a model of this node alone, or its reason."""
        reason = self._static_refusal(node, options) or self._answer(
            _single_node_model(node), options
        )
        if not reason and not self.trusts(options):
            reason = next(map(self._unchecked, computed_elements(node)), "")
        return Reject(reason) if reason else True

    def _unchecked(self, value: Value) -> str:
        return f"{self.title} does not check the elements of {value.name!r}, which a node computes"

    def _static_refusal(self, node: Node, options: Any) -> str:
        """Return why a node is refused without asking the library; "" if it has to be asked."""
        for value in (*node.sources, *node.outputs):
            type_ = value.type
            if not isinstance(type_, TensorType) or type_.shape is None:
                return f"the type of value {value.name!r} is not known: {type_}"
            if type_.dtype not in self.dtypes:
                return f"{self.title} is not used for {type_.dtype} ({value.name!r})"
            if 0 in type_.shape and not self.empty_tensors:
                return f"{self.title} is not used for tensors without elements ({value.name!r})"
        if is_random(node):
            return "random numbers are drawn by Subgraph, so that a seed gives the same ones"
        if pools_nothing(node):
            return f"{self.title} is not asked for a {node.op_type} of an input without pixels"
        if not self.trusts(options):
            if node.bodies or node.domain:
                return f"{self.title} does not check the sizes and indices in {node.op_type}"
            if has_computed_sizes(node):
                return f"{self.title} does not check sizes that follow from values"
            if not has_whole_scales(node):
                return f"{self.title} is used for scales and biases of the normalized sizes alone"
        return self.refusal(node)

    def _answer(self, model: bytes, options: Any) -> str:
        """Return why the library refuses a model, "" if it does not; each model is tried once.

        Args:
            model: The model; weights without data are tried as zeros.
            options: The options of the query.
        """
        key = _key(model, options)
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = self._tried(_with_zeros(model), options)
        return answer

    def _tried(self, model: bytes, options: Any) -> str:
        try:
            with finished_before_fork:
                self.try_library_model(model, options)
        except (ConfigError, MemoryError):  # not about the model
            raise
        except Exception as error:  # libraries have exceptions of their own, under no common class
            return f"{self.title}: {reason_of_library(error)}"
        return ""

    def create_op(self, graph: Graph, options: Any) -> SubgraphOp:
        """Return the op that runs a region by the library; the region is compiled here."""
        return BackendOp(graph, self, options)

    def capability(self) -> dict[str, str]:
        """Return the facts of `Device.capability` and the library's version."""
        return {**super().capability(), "library": self.version()}

    def version(self) -> str:
        """Return the version of the library's package."""
        return library_version(self.module, self.requirement)

    def metrics(self) -> dict[str, Any]:
        """Return the metrics; the full name has the library's version."""
        return {**super().metrics(), "FULL_DEVICE_NAME": f"{self.title} {self.version()}"}


class BackendOp(SubgraphOp):
    """Runs a region by the model that a library compiled from it.

    Attributes:
        backend: The device.
        options: The options with which the region was compiled.
        inputs: Positions of the region's inputs that are inputs of the library's model.
    """

    def __init__(self, subgraph: Graph, device: Backend, options: Any) -> None:
        """Compile ``subgraph`` for ``device``."""
        super().__init__(subgraph)
        self.backend = device
        self.options = options
        self.inputs = [
            k
            for k, value in enumerate(subgraph.inputs)
            if value.parameter is None or self._is_passed(value.parameter)
        ]
        passed = {subgraph.inputs[k].parameter for k in self.inputs}
        self._parameters = [p for p in all_parameters(subgraph) if p not in passed]
        self._recipe = f"{device.name} model {next(_numbers)}"
        self._entry: WeightEntry | None = None
        self.compiled()

    def _is_passed(self, parameter: Parameter) -> bool:
        """Return whether a weight is an input of the library's model.

        Small integers, such as axes and sizes, stay inside, and scalars, such as the bounds of a
        Clip: many libraries need their values to compile.
        """
        small = parameter.nbytes <= _SMALL_WEIGHT_BYTES and parameter.array.dtype.kind in "iub"
        inside = small or parameter.array.ndim == 0 or not self.backend.passes_weights
        return self.options.WEIGHTS == "inputs" and not inside

    def compiled(self) -> LibraryModel:
        """Return the library's model for the versions of the weights that this thread sees.

        The model is an entry of the weight cache, so it is compiled anew for new versions.

        Raises:
            DeviceError: the library refuses the region.
        """
        entry = self._entry
        if entry is None:
            entry = self.weights.entry(self._recipe, lambda *_: self._compile(), *self._parameters)
            self._entry = entry
        model: LibraryModel = entry.get()
        return model

    def release(self) -> None:
        """Free the library's model and its threads."""
        super().release()
        self._entry = None

    def _compile(self) -> LibraryModel:
        try:
            model = library_model_of(self.subgraph, self.inputs)
        except ModelError as error:
            raise self.failure("compile", error) from error
        try:
            with finished_before_fork:
                return self.backend.compile_library_model(model, self.options)
        except (SubgraphError, MemoryError):
            raise
        except Exception as error:
            raise self.failure("compile", error) from error

    def failure(self, what: str, error: Exception) -> DeviceError:
        """Return the error for an exception of the library.

        Args:
            what: "compile" or "run".
            error: The exception.
        """
        return DeviceError(
            f"device {self.backend.name}: {self.backend.title} cannot {what} region "
            f"{self.subgraph.name!r}: {reason_of_library(error)}"
        )

    def to_export(self, file: ExportFile) -> dict[str, Any] | None:
        """Return no state: an import compiles the region's graph again."""
        return {}

    def session(self) -> Session:
        """Return a session with a runner of its own."""
        return _BackendSession(self)


class _BackendSession(Session):
    """One request's runner of the compiled model; replaced when a weight has a new version."""

    def __init__(self, op: BackendOp) -> None:
        super().__init__(op)
        self._op = op
        self._model: LibraryModel | None = None
        self._run: Callable[..., Sequence[Array]] | None = None
        known = op.backend.writes_outputs
        self._fixed = [_fixed_type(v.type) if known else None for v in op.subgraph.outputs]
        self._no_targets: list[Array | None] = [None] * len(self._fixed)
        self._default: Session = DefaultSubgraphOp(op.subgraph).session()
        trusted = op.backend.trusts(op.options)
        self._operands = None if trusted else OperandChecks(op.subgraph)
        self._runs_empty = op.backend.empty_tensors
        self._inputs = op.inputs

    def __call__(
        self, inputs: Sequence[Any], outputs: Sequence[Array | None] | None = None
    ) -> Sequence[Any]:
        arrays: list[Array] = []
        for k in self._inputs:
            array = inputs[k]
            if type(array) is Parameter:
                array = array.array
            if not array.flags.c_contiguous:
                array = np.array(array, order="C")
            if not array.size and not self._runs_empty:
                return self._default(inputs, outputs)
            arrays.append(array)
        if self._operands is not None and not self._operands.check(inputs):
            return self._default(inputs, outputs)
        model = self._op.compiled()
        if model is not self._model or self._run is None:
            with finished_before_fork:
                self._model, self._run = model, model.runner()
        into = self._no_targets
        if outputs is not None:
            into = [_fitting(t, fixed) for t, fixed in zip(outputs, self._fixed, strict=True)]
        try:
            with finished_before_fork:
                results = self._run(arrays, into)
        except (SubgraphError, MemoryError):
            raise
        except Exception as error:
            raise self._op.failure("run", error) from error
        return results if outputs is None else fill_outputs(results, outputs)


def import_library(module: str, requirement: str, title: str, load: Callable[[], Any]) -> Any:
    """Import the package of a backend.

    Args:
        module: Name of the module.
        requirement: Requirement for pip, with the oldest version that works.
        title: Name of the library in messages.
        load: Returns the library, or raises ImportError.

    Raises:
        DeviceError: the package is missing, too old, or cannot be imported.
    """
    install = f"pip install '{requirement}'"
    found = library_version(module, requirement)
    oldest = requirement.partition(">=")[2].strip()
    if found and _numbers_of(found) < _numbers_of(oldest):
        raise DeviceError(f"{title} {found} is too old, {oldest} is needed: {install}")
    try:
        return load()
    except ImportError as error:
        raise DeviceError(f"{title} is not installed ({error}): {install}") from error


def library_version(module: str, requirement: str) -> str:
    """Return the version of an installed package; "" if it is not installed."""
    for name in (requirement.partition(">=")[0].strip(), module):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def _numbers_of(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, "1.22.0rc1" as (1, 22, 0)."""
    numbers: list[int] = []
    for part in text.split("."):
        digits = "".join(itertools.takewhile(str.isdigit, part))
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def reason_of_library(error: BaseException) -> str:
    """Return the first lines of a library's message, at most 400 characters, with its class."""
    text = " ".join(message_of(error).split())
    return f"{type(error).__name__}: {text[:400]}" if text else type(error).__name__


def library_model_of(subgraph: Graph, inputs: Sequence[int]) -> bytes:
    """Return a region as a serialized ONNX model, with the weights that this thread sees.

    Args:
        subgraph: The region.
        inputs: Positions of the region's inputs that are inputs of the model; the others, which
            are weights, become initializers.
    """
    copy, values = subgraph.clone_with_map()
    ports: list[Value] = []
    for k in inputs:
        value = values[subgraph.inputs[k]]
        if value.parameter is not None:
            value.type, value.parameter = value.parameter.type, None
        ports.append(value)
    model = Graph(ports, copy.outputs, subgraph.name, nodes=copy.nodes, opsets=copy.opsets)
    return _serialized(model, lambda parameter: parameter.array)


def _serialized(model: Graph, array_of: Callable[[Parameter], Array | None]) -> bytes:
    """Return a graph as a serialized ONNX model.

    Args:
        model: The graph.
        array_of: Returns the array of a weight, or None for an initializer without data.
    """
    from subgraph.onnx_format.writer import GraphWriter
    from subgraph.operators.protobuf import tensor_to_proto

    writer = GraphWriter(model, states={p: p.state for p in all_parameters(model)})
    proto = writer.model()
    for parameter, name in writer.names.items():
        array = array_of(parameter)
        if array is None:
            kind = ONNX_DTYPE[parameter.type.dtype]
            proto.graph.initializer.add(name=name, data_type=kind, dims=parameter.array.shape)
        else:
            proto.graph.initializer.append(tensor_to_proto(array, name))
    serialized: bytes = proto.SerializeToString()
    return serialized


def _with_zeros(model: bytes) -> bytes:
    """Return a serialized model with zeros in the initializers without data."""
    import onnx

    from subgraph.operators.protobuf import tensor_to_proto

    proto = onnx.load_from_string(model)
    for tensor in proto.graph.initializer:
        has_data = any(field.name in _DATA_FIELDS for field, _ in tensor.ListFields())
        if not has_data and math.prod(tensor.dims):
            zeros = np.zeros(tuple(tensor.dims), numpy_dtype(DTYPE_OF_ONNX[tensor.data_type]))
            tensor.CopyFrom(tensor_to_proto(zeros, tensor.name))
    serialized: bytes = proto.SerializeToString()
    return serialized


def _key(model: bytes, options: Any) -> bytes:
    """Return the key of an answer: a hash of the model and the options of the query."""
    return hashlib.sha256(repr(options).encode() + model).digest()


def _single_node_model(node: Node) -> bytes:
    """Return a model of one node with normalised names, so that equal nodes give equal bytes."""
    graph = node.graph
    assert graph is not None, "a device is asked about nodes of a graph"
    values: dict[Value, Value] = {}
    (copy,) = copy_nodes((node,), values)
    for value, inside in values.items():
        if value in graph.inputs:  # one with a default is not a weight: a run may replace it
            inside.parameter = None
    inputs = [v for v in values.values() if v.producer is None and v.parameter is None]
    used = [v for v in node.outputs if v.uses or v in graph.outputs]
    outputs = [values[v] for v in used or node.outputs]
    model = Graph(inputs, outputs, "node", nodes=[copy], opsets=graph.opsets)
    for k, value in enumerate(model.values()):
        value.name = f"v{k}"
    for inner in model.nodes:
        inner.name = inner.op_type
        inner.metadata = {}
    return _serialized(model, _if_small)


def _if_small(parameter: Parameter) -> Array | None:
    return parameter.array if parameter.nbytes <= _SMALL_WEIGHT_BYTES else None


def _fixed_type(type_: Any) -> tuple[tuple[int, ...], Any] | None:
    """Return shape and NumPy dtype of an output that a library can write, else None."""
    found = static_form(type_)
    return None if found is None or found[1].hasobject or 0 in found[0] else found


def _fitting(target: Array | None, fixed: tuple[tuple[int, ...], Any] | None) -> Array | None:
    """Return the caller's array if the library may write an output into it, else None.

    Args:
        target: Array of the caller; None for none.
        fixed: Shape and dtype of the output; None if unknown.
    """
    if target is None or (target.shape, target.dtype) != fixed:
        return None
    return target if target.flags.c_contiguous and target.flags.writeable else None

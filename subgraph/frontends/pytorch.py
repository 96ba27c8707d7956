"""Models of PyTorch: as graphs (`from_torch`), and by the backend of ``torch.compile``.

PyTorch exports a module as a graph of its own operators, and its exporter writes these as ONNX.
``torch.compile`` hands over each graph that it traces, with the weights among the inputs;
`torch_backend` makes parameters of them, so that they are packed once. PyTorch counts the changes
of a tensor in place, so that a changed weight is noticed, and assigned, before the next run.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import attrs
import ml_dtypes
import numpy as np

from subgraph.devices.default_core import compile_model
from subgraph.errors import ConfigError, ModelError, ShapeError, SubgraphError
from subgraph.graph.graph import Graph
from subgraph.graph.parameters import Parameter, transaction
from subgraph.graph.types import Array
from subgraph.onnx_format.file import load
from subgraph.partition.property import optimize_for
from subgraph.system.registry import nearest
from subgraph.transform.pass_manager import apply_pass

_OPTIONS = ("config", "device", "property")


def from_torch(
    module: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
) -> Graph:
    """Return the graph of a PyTorch module; its parameters have the names of ``state_dict``.

    Args:
        module: A ``torch.nn.Module``, in the mode in which it shall run: ``module.eval()``.
        args: Example inputs by position: tensors with the dtypes and shapes that the graph takes.
        kwargs: Example inputs by name.
        dynamic_shapes: The sizes that may differ from those of the examples, as for
            ``torch.export.export``: ``({0: torch.export.Dim("batch")},)``. None: no size may.

    Raises:
        ModelError: PyTorch or its exporter is not installed, ``module`` is no module, it changes
            its buffers or inputs, or PyTorch cannot write it as ONNX.
    """
    torch = _torch()
    if not isinstance(module, torch.nn.Module):
        raise ModelError(
            f"from_torch takes a torch.nn.Module, got {type(module).__name__}; a function becomes "
            "a module as the method forward of a class of its own"
        )
    # While gradients are recorded, PyTorch traces attention as operators that ONNX has, too.
    with torch.enable_grad():
        exported = _exported(torch, module, tuple(args), dict(kwargs or {}), dynamic_shapes)
    signature = exported.graph_signature
    changed = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
    if changed:
        raise ModelError(
            f"{_title(module)} changes {', '.join(changed)} in place, which a graph cannot; call "
            "module.eval(), or return the changed tensor as a result"
        )
    return _graph_of(torch, exported)


def torch_backend(
    module: Any, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a traced graph: ``torch.compile(module, backend="subgraph")``.

    PyTorch itself runs a graph that cannot run here, after a RuntimeWarning that says why: one that
    is differentiated, has tensors that are not on the processor, has operators without a form in
    ONNX, or gives other results for the inputs of the first call.

    Args:
        module: The ``torch.fx.GraphModule``.
        example_inputs: The tensors of the first call, weights included, and its symbolic sizes.
        options: The argument of that name of ``torch.compile``: "device" (default "CPU"), "config"
            (a dict for `compile_model`), and "property" (a `SubgraphProperty`, or the name of a
            registered one, by which the graph is partitioned).

    Returns:
        A function that takes the inputs of ``module`` and returns its results.

    Raises:
        ConfigError: an option is unknown, or its value is wrong.
        SubgraphError: the device or the property raised it.
    """
    torch = _torch()
    options = dict(options or {})
    for name in options:
        if name not in _OPTIONS:
            raise ConfigError(
                f"the backend subgraph of torch.compile has no option {name!r}; "
                f"{nearest(name, _OPTIONS)}"
            )
    reason = _obstacle(torch, example_inputs)
    if not reason:
        try:
            traced = _Traced.of(torch, module, example_inputs)
        except SubgraphError as error:
            reason = f"{error}"
        else:
            compiled = _Compiled(torch, traced, options)
            # PyTorch's exporter gives some operators another meaning, without an error.
            reason = _difference(torch, module, compiled, example_inputs, traced.changed)
            if not reason:
                return compiled
    count = sum(node.op.startswith("call") for node in module.graph.nodes)
    warnings.warn(
        f"PyTorch itself runs a graph of {count} operators: {reason}", RuntimeWarning, stacklevel=2
    )
    run: Callable[..., Any] = module.forward
    return run


def _torch() -> Any:
    """Return the module torch.

    Raises:
        ModelError: PyTorch or its exporter is not installed.
    """
    missing = [name for name in ("torch", "onnxscript") if find_spec(name) is None]
    if missing:
        raise ModelError(
            f"models of PyTorch need {' and '.join(missing)}, which is not installed: "
            'pip install "subgraph-ml[torch]"'
        )
    return import_module("torch")


def _exported(
    torch: Any,
    module: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
) -> Any:
    """Return the ``torch.export.ExportedProgram`` of a module, without operators in place.

    Raises:
        ModelError: PyTorch cannot trace the module.
    """
    try:
        # Inside torch.compile, the outer trace must not see this one.
        with torch._guards.tracing(None):
            exported = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes)
            # Its signature then lists what the operators in place have changed.
            return exported.run_decompositions({})
    except Exception as error:  # of any type: the module's code runs
        raise ModelError(f"PyTorch cannot export {_title(module)}: {_cause(error)}") from error


def _graph_of(torch: Any, exported: Any) -> Graph:
    """Return the graph of an exported program.

    Raises:
        ModelError: an operator has no form in ONNX.
    """
    try:
        # The optimiser would compute constants from weights, which are then no parameters.
        with torch._guards.tracing(None):
            written = torch.onnx.export(exported, dynamo=True, optimize=False, verbose=False)
    except Exception as error:  # of any type, from the function for any operator
        raise ModelError(f"PyTorch cannot write it as ONNX: {_cause(error)}") from error
    # The zero biases of convolutions, for example, are computed from the shapes of weights.
    return apply_pass(load(written.model_proto), "ConstantFolding")


def _title(module: Any) -> str:
    name = type(module).__name__
    return "the traced graph" if name.startswith("GraphModule") else f"module {name}"


def _cause(error: BaseException) -> str:
    """Return the type and the first line of the error behind ``error``."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _obstacle(torch: Any, example_inputs: Sequence[Any]) -> str:
    """Return why no graph with these inputs can run here; "" if none of them is in the way."""
    if torch.is_autocast_enabled("cpu"):
        return "torch.autocast is on; the device has INFERENCE_PRECISION for that"
    for item in example_inputs:
        if isinstance(item, torch.SymInt):
            continue
        if not isinstance(item, torch.Tensor):
            return f"an input is a {type(item).__name__}, not a tensor"
        if item.device.type != "cpu" or item.layout != torch.strided or item.is_quantized:
            return f"an input is on {item.device} as {item.layout}, not dense and on cpu"
        if item.requires_grad and torch.is_grad_enabled():
            return (
                "it is differentiated; torch.no_grad() or inference_mode() around the call runs it"
            )
    return ""


@attrs.frozen
class _Traced:
    """A graph that ``torch.compile`` has traced.

    Attributes:
        graph: The graph; its inputs are the tensors that differ from call to call.
        inputs: The position of each of these among the inputs of the traced graph.
        weights: The position of each weight, its parameter, and its tensor at the first call.
        changed: The positions of the inputs that the traced graph changes in place; their new
            values are the first outputs of the graph.
    """

    graph: Graph
    inputs: list[int]
    weights: list[tuple[int, Parameter, Any]]
    changed: list[int]

    @classmethod
    def of(cls, torch: Any, module: Any, example_inputs: Sequence[Any]) -> _Traced:
        """Return a traced graph with parameters for the tensors that its module owns.

        Args:
            torch: The module torch.
            module: The ``torch.fx.GraphModule``.
            example_inputs: The inputs of the first call.

        Raises:
            ModelError: PyTorch cannot write it as ONNX, or a result is not a tensor.
        """
        alone, positions = _with_tensors_only(torch, module, example_inputs)
        holders = [node for node in alone.graph.nodes if node.op == "placeholder"]
        tensors = tuple(example_inputs[position] for position in positions)
        shapes = _dynamic_shapes(torch, holders)
        exported = _exported(torch, alone, tensors, {}, shapes)
        signature = exported.graph_signature
        names: Sequence[str] = signature.user_inputs
        changed = [positions[names.index(k)] for k in signature.user_inputs_to_mutate.values()]
        if changed:
            # The new values are the first results of its graph, but no results of the program.
            exported = _exported(torch, exported.graph_module, tensors, {}, shapes)
        graph = _graph_of(torch, exported)
        inputs: list[int] = []
        weights: list[tuple[int, Parameter, Any]] = []
        for position, tensor, node, value in zip(
            positions, tensors, holders, graph.inputs, strict=True
        ):
            # PyTorch marks the parameters and buffers of the module, whose addresses stay.
            static = "_dynamo_static_input_type" in node.meta.get("tensor_dict", ())
            if static and position not in changed:
                value.parameter = Parameter(value.name, _array(torch, tensor))
                weights.append((position, value.parameter, tensor))
            else:
                inputs.append(position)
        graph.inputs = tuple(value for value in graph.inputs if value.parameter is None)
        graph.refresh_parameters()
        return cls(graph, inputs, weights, changed)


def _with_tensors_only(
    torch: Any, module: Any, example_inputs: Sequence[Any]
) -> tuple[Any, list[int]]:
    """Return a copy of a traced graph that takes no symbolic sizes, which its tensors have, too.

    Args:
        torch: The module torch.
        module: The ``torch.fx.GraphModule``.
        example_inputs: Its inputs at the first call.

    Returns:
        The copy, and the position of each of its inputs among those of ``module``.

    Raises:
        ModelError: no tensor among the inputs has the size, or a result is not a tensor.
    """
    graph = copy.deepcopy(module.graph)
    holders = [node for node in graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in graph.nodes if node.op == "output")
    for node in output.args[0]:
        if not isinstance(getattr(node, "meta", {}).get("example_value"), torch.Tensor):
            raise ModelError(f"its result {node} is not a tensor")
    sizes: dict[str, tuple[Any, int]] = {}
    for node in holders:
        for axis, size in enumerate(getattr(node.meta["example_value"], "shape", ())):
            sizes.setdefault(str(size), (node, axis))
    positions: list[int] = []
    for position, (node, example) in enumerate(zip(holders, example_inputs, strict=True)):
        if not isinstance(example, torch.SymInt):
            positions.append(position)
            continue
        if node.users:
            found = sizes.get(str(node.meta["example_value"]))
            if found is None:
                raise ModelError(f"no tensor among its inputs has the size {node}")
            with graph.inserting_after(holders[-1]):
                size = graph.call_function(torch.ops.aten.sym_size.int, found)
            node.replace_all_uses_with(size)
        graph.erase_node(node)
    return torch.fx.GraphModule(module, graph), positions


def _dynamic_shapes(torch: Any, holders: Sequence[Any]) -> tuple[dict[int, Any], ...]:
    """Return ``dynamic_shapes`` of ``torch.export`` for the inputs of a traced graph."""
    return tuple(
        {
            axis: torch.export.Dim.AUTO
            for axis, size in enumerate(node.meta["example_value"].shape)
            if isinstance(size, torch.SymInt)
        }
        for node in holders
    )


class _Weight:
    """A weight of a compiled graph.

    Attributes:
        position: Its position among the inputs of the traced graph.
        parameter: The parameter of the compiled graph.
        tensor: The tensor that was assigned to the parameter.
        version: Its `_version` then.
    """

    __slots__ = ("parameter", "position", "tensor", "version")

    def __init__(self, position: int, parameter: Parameter, tensor: Any) -> None:
        """Note that ``parameter`` has the values of ``tensor``."""
        self.position = position
        self.parameter = parameter
        self.tensor = tensor
        self.version = _version(tensor)

    def is_current(self, tensor: Any) -> bool:
        """Return whether the parameter has the values of ``tensor``."""
        return tensor is self.tensor and _version(tensor) == self.version


def _version(tensor: Any) -> tuple[int, int]:
    """Return the number of changes in place of a tensor, 0 in inference mode, and its address."""
    return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr()


class _Compiled:
    """A traced graph, compiled for a device."""

    def __init__(self, torch: Any, traced: _Traced, options: Mapping[str, Any]) -> None:
        """Compile ``traced``; see `torch_backend`.

        Raises:
            SubgraphError: the device or the property raised it.
        """
        graph = traced.graph
        if "property" in options:
            graph = optimize_for(graph, options["property"])
        self._torch = torch
        self._model = compile_model(graph, options.get("device", "CPU"), options.get("config"))
        self._inputs, self._changed = traced.inputs, traced.changed
        self._weights = [_Weight(*weight) for weight in traced.weights]
        self._lock = threading.Lock()

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Run the graph; weights that have changed since the last call are assigned before."""
        if not all(weight.is_current(inputs[weight.position]) for weight in self._weights):
            self._assign(inputs)
        torch = self._torch
        results = self._model(*[_array(torch, inputs[k]) for k in self._inputs])
        found = [_tensor(torch, array) for array in results.to_tuple()]
        for position, new in zip(self._changed, found, strict=False):
            inputs[position].copy_(new)
        return tuple(found[len(self._changed) :])

    def _assign(self, inputs: Sequence[Any]) -> None:
        """Assign the weights that have changed, in one transaction."""
        with self._lock:
            changed: list[tuple[_Weight, Any, tuple[int, int]]] = []
            with transaction():
                for weight in self._weights:
                    tensor = inputs[weight.position]
                    if not weight.is_current(tensor):
                        changed.append((weight, tensor, _version(tensor)))
                        weight.parameter.assign(_array(self._torch, tensor))
            # Calls of other threads wait for the lock until the parameters have their values.
            for weight, tensor, version in changed:
                weight.tensor, weight.version = tensor, version


# Difference of results, relative to the largest element, from which on they are not those of the
# same computation. Rounding to bfloat16 inside of a network gives less (estimate).
_SAME = 0.1


def _difference(
    torch: Any,
    module: Any,
    compiled: Callable[..., Any],
    example_inputs: Sequence[Any],
    changed: Collection[int],
) -> str:
    """Return how results differ from those of PyTorch; "" if they do not.

    Args:
        torch: The module torch.
        module: The traced graph.
        compiled: The same, compiled.
        example_inputs: Its inputs at the first call.
        changed: The positions of those that it changes in place, of which copies are used.
    """

    def inputs() -> list[Any]:
        found = [x.node.hint if isinstance(x, torch.SymInt) else x for x in example_inputs]
        return [x.clone() if k in changed else x for k, x in enumerate(found)]

    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        wanted = module(*inputs())
        try:
            found = compiled(*inputs())
        except ShapeError as error:
            return f"{error}"
    for one, other in zip(found, wanted, strict=True):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return f"a result is {one.dtype} {[*one.shape]}, not {other.dtype} {[*other.shape]}"
        if one.numel():
            one, other = (x.double().nan_to_num(nan=0.0) for x in (one, other))
            far = float((one - other).abs().max()) / max(float(other.abs().max()), 1e-30)
            if far > _SAME:
                return f"a result differs from PyTorch's by {far:.2g} of its largest element"
    return ""


def _array(torch: Any, tensor: Any) -> Array:
    """Return an array over the memory of a tensor."""
    array: Array
    if tensor.dtype == torch.bfloat16:  # which PyTorch does not give to NumPy
        array = tensor.detach().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    else:
        array = tensor.detach().numpy()
    return array


def _tensor(torch: Any, array: Array) -> Any:
    """Return a tensor over the memory of an array."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)

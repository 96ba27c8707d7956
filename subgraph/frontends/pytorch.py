"""Models of PyTorch: as graphs (`from_torch`), and by the backend of ``torch.compile``.

PyTorch exports a module as a graph of its own operators, and its exporter writes these as ONNX.
``torch.compile`` hands over each graph that it traces, with the weights among the inputs;
`torch_backend` makes parameters of them, so that they are packed once. PyTorch counts the changes
of a tensor in place, so that a changed weight is noticed, and assigned, before the next run.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import attrs
import ml_dtypes
import numpy as np

from subgraph.devices.default_core import compile_model
from subgraph.errors import ConfigError, ModelError, SubgraphError
from subgraph.frontends.pytorch_decompositions import decompositions
from subgraph.frontends.pytorch_difference import cause, difference, example_of
from subgraph.frontends.pytorch_parts import run_in_parts, unwritten_operator
from subgraph.frontends.pytorch_results import split_results
from subgraph.graph.graph import Graph
from subgraph.graph.parameters import Parameter, transaction
from subgraph.graph.types import Array
from subgraph.onnx_format.file import load
from subgraph.operators.operator import is_random
from subgraph.partition.property import optimize_for
from subgraph.system.registry import nearest
from subgraph.transform.pass_manager import apply_pass

_OPTIONS = ("config", "device", "property")
_OLDEST = "2.7"  # PyTorch 2.6 cannot write batch normalizations


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
    if isinstance(args, torch.Tensor):
        raise ModelError("the example inputs are one tensor; give a tuple: (x,)")
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
    module: Any,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a traced graph: ``torch.compile(module, backend="subgraph")``.

    PyTorch itself runs operators without a form in ONNX, and a graph that cannot run here, after a
    RuntimeWarning that says why: one that is differentiated, has tensors that are not on the
    processor, or gives other results for the inputs of the first call.

    Args:
        module: The ``torch.fx.GraphModule``.
        example_inputs: The tensors of the first call, weights included, and its symbolic sizes.
        mode: The argument of that name of ``torch.compile``; there is one mode, whatever it says.
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
        except _UnwrittenError as error:
            reason = f"{error}"

            def compile_part(part: Any, examples: Sequence[Any]) -> Callable[..., Any]:
                return torch_backend(part, examples, options=options)

            parts = run_in_parts(torch, module, example_inputs, error.operator, compile_part)
            if parts is not None:
                run, count = parts
                _warn(f"{count} of {_operators(module)} operators", reason)
                return run
        except SubgraphError as error:
            reason = f"{error}"
        else:
            if not traced.graph.outputs:  # nothing is computed
                return _forward(module)
            compiled = _Compiled(torch, module, traced, options)
            # PyTorch's exporter gives some operators another meaning, without an error.
            reason = difference(torch, module, compiled.run, example_inputs, traced.changed)
            if not reason:
                return compiled
    _warn(f"a graph of {_operators(module)} operators", reason)
    return _forward(module)


class _UnwrittenError(ModelError):
    """PyTorch cannot write a graph as ONNX.

    Attributes:
        operator: The operator in the way, as "aten.roll.default"; "" if unknown.
    """

    operator = ""


def _operators(module: Any) -> int:
    """Return the number of operators of a traced graph."""
    return sum(node.op.startswith("call") for node in module.graph.nodes)


def _warn(what: str, reason: str) -> None:
    warnings.warn(f"PyTorch itself runs {what}: {reason}", RuntimeWarning, stacklevel=3)


def _forward(module: Any) -> Callable[..., Any]:
    run: Callable[..., Any] = module.forward
    return run


def _torch() -> Any:
    """Return the module torch.

    Raises:
        ModelError: PyTorch or its exporter is not installed, or PyTorch is too old.
    """
    missing = [name for name in ("torch", "onnxscript") if find_spec(name) is None]
    if missing:
        raise ModelError(
            f"models of PyTorch need {' and '.join(missing)}, which is not installed: "
            'pip install "subgraph-ml[torch]"'
        )
    torch = import_module("torch")
    if torch.__version__ < _OLDEST:
        raise ModelError(
            f"models of PyTorch need PyTorch {_OLDEST} or newer, {torch.__version__} is installed: "
            'pip install --upgrade "subgraph-ml[torch]"'
        )
    return torch


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
        # Inside torch.compile, the outer trace must not see this one. PyTorch warns of what the
        # exporter itself does.
        with torch._guards.tracing(None), warnings.catch_warnings(action="ignore"):
            exported = torch.export.export(
                module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False
            )
            # Its signature then lists what the operators in place have changed.
            return exported.run_decompositions(decompositions(torch))
    except Exception as error:  # of any type: the module's code runs
        raise ModelError(f"PyTorch cannot export {_title(module)}: {cause(error)}") from error


def _graph_of(torch: Any, exported: Any) -> Graph:
    """Return the graph of an exported program.

    Raises:
        _UnwrittenError: an operator has no form in ONNX.
    """
    try:
        # The optimiser would compute constants from weights, which are then no parameters.
        with torch._guards.tracing(None), warnings.catch_warnings(action="ignore"):
            written = torch.onnx.export(exported, dynamo=True, optimize=False, verbose=False)
    except Exception as error:  # of any type, from the function for any operator
        made = _UnwrittenError(f"PyTorch cannot write it as ONNX: {cause(error)}")
        made.operator = unwritten_operator(error)
        raise made from error
    # The zero biases of convolutions, for example, are computed from the shapes of weights.
    return apply_pass(load(written.model_proto), "ConstantFolding")


def _title(module: Any) -> str:
    name = type(module).__name__
    return "the traced graph" if name.startswith("GraphModule") else f"module {name}"


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
        if item.is_complex():
            return "an input is complex, which operators of ONNX do not take"
        if item.requires_grad and torch.is_grad_enabled():
            return (
                "it is differentiated; torch.no_grad() or inference_mode() around the call runs it"
            )
    return ""


@attrs.frozen
class _Traced:
    """A graph that ``torch.compile`` has traced.

    Attributes:
        graph: The graph; its inputs are the tensors and numbers that differ from call to call.
        inputs: The position of each of these among the inputs of the traced graph.
        weights: The position of each weight, its parameter, and its tensor at the first call.
        changed: The positions of the inputs that the traced graph changes in place; their new
            values are the first outputs of the graph.
        finish: Returns the results for the inputs and the other outputs of the graph.
    """

    graph: Graph
    inputs: list[int]
    weights: list[tuple[int, Parameter, Any]]
    changed: list[int]
    finish: Callable[..., tuple[Any, ...]]

    @classmethod
    def of(cls, torch: Any, module: Any, example_inputs: Sequence[Any]) -> _Traced:
        """Return a traced graph with parameters for the tensors that its module owns.

        Args:
            torch: The module torch.
            module: The ``torch.fx.GraphModule``.
            example_inputs: The inputs of the first call.

        Raises:
            ModelError: PyTorch cannot write it as ONNX, or not for all values of a number that it
                takes, a result is neither a tensor nor a size, or it draws random numbers.
        """
        computed, finish = split_results(torch, module)
        alone, positions = _without_sizes(torch, module, computed, example_inputs)
        holders = [node for node in alone.graph.nodes if node.op == "placeholder"]
        examples = [example_of(torch, example_inputs[position]) for position in positions]
        # PyTorch refuses tensors that share memory with one that is changed; see `_Compiled.run`.
        seen = Counter(map(_address, examples))
        apart = tuple(x.clone() if _address(x) and seen[_address(x)] > 1 else x for x in examples)
        exported = _exported(torch, alone, apart, {}, _dynamic_shapes(torch, holders))
        _check_numbers(torch, holders, exported)
        signature = exported.graph_signature
        names: Sequence[str] = signature.user_inputs
        changed = [positions[names.index(k)] for k in signature.user_inputs_to_mutate.values()]
        # The new values are results of its graph, and here become results of the program.
        for spec in signature.output_specs:
            spec.kind, spec.target = torch.export.graph_signature.OutputKind.USER_OUTPUT, None
        results = torch.utils._pytree.tree_structure((0,) * len(signature.output_specs))
        exported.module_call_graph[0].signature.out_spec = results
        graph = _graph_of(torch, exported)
        if drawing := [node.op_type for node in graph.nodes if is_random(node)]:
            raise ModelError(f"its random numbers ({drawing[0]}) would not be PyTorch's")
        inputs: list[int] = []
        weights: list[tuple[int, Parameter, Any]] = []
        for position, tensor, node, value in zip(
            positions, examples, holders, graph.inputs, strict=True
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
        return cls(graph, inputs, weights, changed, finish)


def _without_sizes(
    torch: Any, module: Any, results: Sequence[Any], example_inputs: Sequence[Any]
) -> tuple[Any, list[int]]:
    """Return a copy of a traced graph that takes no symbolic sizes, which its tensors have, too.

    Args:
        torch: The module torch.
        module: The ``torch.fx.GraphModule``.
        results: The nodes whose tensors the copy returns.
        example_inputs: Its inputs at the first call.

    Returns:
        The copy, and the position of each of its inputs among those of ``module``: of the tensors,
        and of the numbers that are no size of a tensor.
    """
    graph = torch.fx.Graph()
    copies: dict[Any, Any] = {}
    graph.graph_copy(module.graph, copies)
    graph.output(tuple(copies[node] for node in results))
    holders = [node for node in graph.nodes if node.op == "placeholder"]
    sizes: dict[str, tuple[Any, int]] = {}
    for node in holders:
        for axis, size in enumerate(getattr(node.meta["example_value"], "shape", ())):
            sizes.setdefault(str(size), (node, axis))
    positions: list[int] = []
    for position, (node, example) in enumerate(zip(holders, example_inputs, strict=True)):
        found = sizes.get(str(node.meta["example_value"]))
        if not isinstance(example, torch.SymInt) or (node.users and found is None):
            positions.append(position)
            continue
        if node.users:
            with graph.inserting_after(holders[-1]):
                size = graph.call_function(torch.ops.aten.sym_size.int, found)
            node.replace_all_uses_with(size)
        graph.erase_node(node)
    return torch.fx.GraphModule(module, graph), positions


def _dynamic_shapes(torch: Any, holders: Sequence[Any]) -> tuple[Any, ...]:
    """Return ``dynamic_shapes`` of ``torch.export`` for the inputs of a traced graph."""
    values = [node.meta["example_value"] for node in holders]
    # PyTorch 2.7 takes each number for a constant, which `_check_numbers` notices.
    number = torch.export.Dim.AUTO if torch.__version__ >= "2.8" else None
    return tuple(
        number
        if isinstance(value, torch.SymInt)
        else {
            axis: torch.export.Dim.AUTO
            for axis, size in enumerate(value.shape)
            if isinstance(size, torch.SymInt)
        }
        for value in values
    )


def _check_numbers(torch: Any, holders: Sequence[Any], exported: Any) -> None:
    """Check that an exported program serves all values of the numbers that it takes.

    Raises:
        ModelError: it holds for the number of the first call only.
    """
    made = [node for node in exported.graph.nodes if node.op == "placeholder"]
    for node, placeholder in zip(holders, made[len(made) - len(holders) :], strict=True):
        number = isinstance(node.meta["example_value"], torch.SymInt)
        if number and not isinstance(placeholder.meta["val"], torch.SymInt):
            raise ModelError(
                f"it takes the number {node}, which differs between calls: pass a tensor"
            )


class _Weight:
    """A weight of a compiled graph.

    Attributes:
        position: Its position among the inputs of the traced graph.
        parameter: The parameter of the compiled graph.
        tensor: The tensor that was assigned to the parameter.
        version: Its `_version` then.
        memory: A weak reference to its memory then, whose address may be used again.
    """

    __slots__ = ("memory", "parameter", "position", "tensor", "version")

    def __init__(self, position: int, parameter: Parameter, tensor: Any) -> None:
        """Note that ``parameter`` has the values of ``tensor``."""
        self.position = position
        self.parameter = parameter
        self.note(tensor, _version(tensor))

    def note(self, tensor: Any, version: tuple[int, int]) -> None:
        """Note that the parameter has the values of ``tensor`` in this version."""
        reductions = import_module("torch.multiprocessing.reductions")
        self.memory = reductions.StorageWeakRef(tensor.untyped_storage())
        self.tensor, self.version = tensor, version

    def is_current(self, tensor: Any) -> bool:
        """Return whether the parameter has the values of ``tensor``."""
        same = tensor is self.tensor and _version(tensor) == self.version
        return same and not self.memory.expired()


def _version(tensor: Any) -> tuple[int, int]:
    """Return the number of changes in place of a tensor, 0 in inference mode, and its address."""
    return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr()


class _Compiled:
    """A traced graph, compiled for a device."""

    def __init__(
        self, torch: Any, module: Any, traced: _Traced, options: Mapping[str, Any]
    ) -> None:
        """Compile ``traced``, the graph of ``module``; see `torch_backend`.

        Raises:
            SubgraphError: the device or the property raised it.
        """
        graph = traced.graph
        if "property" in options:
            graph = optimize_for(graph, options["property"])
        self._torch, self._module = torch, module
        self._model = compile_model(graph, options.get("device", "CPU"), options.get("config"))
        self._inputs, self._changed, self._finish = traced.inputs, traced.changed, traced.finish
        self._weights = [_Weight(*weight) for weight in traced.weights]
        self._lock = threading.Lock()

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Run the graph; weights that have changed since the last call are assigned before."""
        try:
            return self.run(*inputs)
        except SubgraphError as error:  # PyTorch has a result, or an error of its own type
            _warn(f"a graph of {_operators(self._module)} operators", f"{error}")
            results: tuple[Any, ...] = self._module(*inputs)
            return results

    def run(self, *inputs: Any) -> tuple[Any, ...]:
        """Do the same, and raise the error of a run.

        Raises:
            SubgraphError: the run failed, or an input that is changed shares memory with another.
        """
        torch = self._torch
        if self._changed and _share_memory(torch, inputs, self._changed):
            raise ModelError("an input that it changes in place shares memory with another input")
        if not all(weight.is_current(inputs[weight.position]) for weight in self._weights):
            self._assign(inputs)
        results = self._model(*[_array(torch, inputs[k]) for k in self._inputs])
        found = [_tensor(torch, array) for array in results.to_tuple()]
        for position, new in zip(self._changed, found, strict=False):
            inputs[position].copy_(new)
        return self._finish(inputs, found[len(self._changed) :])

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
                weight.note(tensor, version)


def _address(tensor: Any) -> int:
    """Return the address of the memory of a tensor, of which it may be a part; 0 for a number."""
    return 0 if isinstance(tensor, int) else tensor.untyped_storage().data_ptr()


def _share_memory(torch: Any, inputs: Sequence[Any], changed: Collection[int]) -> bool:
    """Return whether one of the inputs ``changed`` may overlap with another input."""
    addresses = [*map(_address, inputs)]
    return any(
        position != other
        and address == addresses[position]
        and np.may_share_memory(_array(torch, inputs[position]), _array(torch, inputs[other]))
        for position in changed
        for other, address in enumerate(addresses)
    )


def _array(torch: Any, tensor: Any) -> Array:
    """Return an array over the memory of a tensor, or with a number."""
    if isinstance(tensor, int):
        return np.asarray(tensor, np.int64)
    tensor = tensor.detach().resolve_neg()
    dtype = _unknown_to_numpy(torch).get(tensor.dtype)
    if dtype is not None:
        tensor = tensor.view(torch.int16 if dtype.itemsize == 2 else torch.int8)
    array: Array = tensor.numpy()
    return array if dtype is None else array.view(dtype)


def _tensor(torch: Any, array: Array) -> Any:
    """Return a tensor over the memory of an array."""
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(array)
    bits = torch.from_numpy(array.view(f"i{array.itemsize}"))
    return bits.view(getattr(torch, array.dtype.name))


@cache
def _unknown_to_numpy(torch: Any) -> dict[Any, np.dtype[Any]]:
    """Return the dtypes of PyTorch that NumPy has not, with those of ml_dtypes."""
    names = [name for name in vars(ml_dtypes) if "float" in name and hasattr(torch, name)]
    return {getattr(torch, name): np.dtype(getattr(ml_dtypes, name)) for name in names}

"""Preparation of a model for a device: reading, preprocessing, precision, partition."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

from subgraph.dtypes import HALF_FLOATS
from subgraph.errors import PartitionError
from subgraph.graph.graph import Graph
from subgraph.graph.parameters import Parameter
from subgraph.graph.types import TensorType, ValueType, numpy_dtype
from subgraph.operators.shape_values import LIMIT
from subgraph.system.environment import BACKENDS

Model = Graph | str | PathLike[str] | bytes | Any


def read_model(model: Model) -> Graph:
    """Return the graph of a model: the graph itself, or one read from a path, bytes or proto."""
    if isinstance(model, Graph):
        return model
    from subgraph.onnx_format.file import load

    return load(model)


def prepared_graph(
    graph: Graph, option: Callable[[str], Any], preprocess: Mapping[str, Any] | None
) -> Graph:
    """Return the graph that a device queries or compiles for a model.

    Preprocessing becomes part of the graph, float16 and bfloat16 become float32 if the option
    INFERENCE_PRECISION is set, loops capture the states that they do not change, and the graph is
    partitioned by the properties that the environment variable ``SUBGRAPH_BACKEND`` names,
    separated by commas.

    Args:
        graph: The model's graph.
        option: Returns the value of a device's option by its name.
        preprocess: `Preprocess` by input name.

    Raises:
        PartitionError: the variable names an unregistered property or selector.
    """
    from subgraph.runtime.control_flow import is_nested
    from subgraph.transform.pass_manager import apply_pass

    # Preprocessing comes first, so that its nodes are converted and partitioned like those of the
    # model.
    if preprocess is not None:
        from subgraph.runtime.preprocessing import preprocessed

        graph = preprocessed(graph, preprocess)
    if option("INFERENCE_PRECISION") == "float32":
        for source in HALF_FLOATS:
            graph = apply_pass(graph, "ConvertPrecision", source=source, target="float32")
    if is_nested(graph):
        graph = apply_pass(graph, "LoopInvariants")
    names = BACKENDS.value()
    return _partitioned(graph, names) if names else graph


def _partitioned(graph: Graph, names: list[str]) -> Graph:
    from subgraph.partition.property import optimize_for

    try:
        return optimize_for(graph, names)
    except PartitionError as error:
        error.add_note(f"the environment variable {BACKENDS.name} asks for {', '.join(names)}")
        raise


def without_defaults(graph: Graph) -> Graph:
    """Return the graph without the inputs that have a default value: they become plain weights.

    Old models list every weight among the inputs. Packed forms are cached for weights, not for
    inputs. `CompiledModel.offer_defaults` lets calls replace such weights.
    """
    if all(value.parameter is None for value in graph.inputs):
        return graph
    copy = graph.clone()
    copy.inputs = tuple(value for value in copy.inputs if value.parameter is None)
    return copy


def region_form(
    graph: Graph, guards: dict[Parameter, int], replace: Callable[[Graph], Graph] | None = None
) -> Graph:
    """Return a copy of a region's graph of nodes that lowerings know, before it is fused.

    Args:
        graph: The graph.
        guards: Gets the parameters whose values the form depends on, with their versions.
        replace: Replaces operators for which the device has others, before the functions that
            define them are expanded; it returns a copy, or the graph.
    """
    from subgraph.operators.schema import contributed
    from subgraph.operators.type_inference import Inference
    from subgraph.partition.regions import without_default_regions
    from subgraph.runtime.control_flow import is_nested
    from subgraph.transform.pass_manager import apply_pass

    graph = without_default_regions(graph.clone())
    # Nodes refer to weights as parameters; the inputs that remain change in every run.
    graph.inputs = tuple(value for value in graph.inputs if value.parameter is None)
    # Types depend on the content of shapes and axes, and passes remove nodes by their types.
    shapes = [value for value in graph.values() if _may_be_shape(value.parameter)]
    guards.update((v.parameter, v.parameter.version) for v in shapes if v.parameter is not None)
    changed = {v: v.type for v in shapes if v.parameter is not None and v.parameter.is_changed}
    if changed:
        Inference(graph, False, set(graph.inputs), {}, changed).run()
    if is_nested(graph):
        graph = apply_pass(graph, "UnfoldControlFlow", guards=guards)
        graph = apply_pass(graph, "InferTypes", strict=False)  # of the copies of bodies
    if replace is not None:
        graph = replace(graph)
    if any(contributed(node.op_type, node.domain) for node in graph.nodes):
        graph = apply_pass(graph, "ExpandFunctions")
    return graph


def _may_be_shape(parameter: Parameter | None) -> bool:
    """Return whether a parameter may hold sizes or axes, by its type."""
    if parameter is None or parameter.type.dtype not in ("int64", "int32"):
        return False
    return math.prod(parameter.type.sizes) <= LIMIT


def static_form(type_: ValueType | None) -> tuple[tuple[int, ...], Any] | None:
    """Return shape and NumPy dtype of a tensor type of known sizes; None for any other type."""
    if not isinstance(type_, TensorType) or not type_.is_static:
        return None
    return type_.sizes, numpy_dtype(type_.dtype)

"""The passes "ConstantFolding" and "ConstantsToParameters".

Folding evaluates nodes that depend only on constants and known shapes, by the operators' reference
implementation. Parameters are not constants: they can be assigned while the model runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import attrs
import numpy as np

from subgraph.errors import SubgraphError
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.limits import size_in_bytes
from subgraph.graph.naming import Names
from subgraph.graph.parameters import Parameter
from subgraph.graph.result_arrays import read_only
from subgraph.graph.types import Array, TensorType, dtype_of, numpy_dtype
from subgraph.operators.inference import infer_types
from subgraph.operators.operator import is_random, operator_of
from subgraph.operators.reference import evaluate
from subgraph.operators.shape_values import propagate, to_array
from subgraph.partition.constants import constant_array
from subgraph.transform.pass_manager import register_pass


@register_pass("ConstantFolding")
@attrs.frozen
class ConstantFolding:
    """Replace nodes whose inputs are all constant by Constant nodes.

    Attributes:
        size_limit: Nodes with a result of more bytes are not folded.
        parameters: Whether parameters count as constants; later assignments to them then have no
            effect on the result.
    """

    # An estimate: folding is meant for shape arithmetic and small tables. A larger result would
    # make the graph and its file larger than what it replaces.
    size_limit: int = 1 << 20
    parameters: bool = False

    def __call__(self, graph: Graph) -> Graph:
        """Return a copy of ``graph`` with its constants folded, bodies included."""
        graph = graph.clone()
        outside: dict[Value, Array] = {}
        # The caller may override an input, which bodies read by its parameter.
        overridable = {value.parameter for value in graph.inputs}
        # The outer graph first: its folded values are constants of the bodies that capture them.
        for level in graph.levels():
            known = self._known(level, outside, overridable)
            level.rewire(self._fold(level, known))
            for node in level.nodes:
                captured = iter(node.captures)
                for inner in (v for body in node.bodies for v in body.captures):
                    array = _constant(next(captured))
                    if array is not None:
                        outside[inner] = array
        for level in reversed(graph.levels()):
            level.remove_unused()
        return graph

    def _known(
        self,
        graph: Graph,
        outside: Mapping[Value, Array],
        overridable: AbstractSet[Parameter | None],
    ) -> dict[Value, Array]:
        """Return the arrays of constant captures, and of parameters if they count as constants."""
        known = {value: outside[value] for value in graph.captures if value in outside}
        if self.parameters:
            for node in graph.nodes:
                for value in node.sources:
                    if value.parameter is not None and value.parameter not in overridable:
                        known[value] = value.parameter.array
        return known

    def _fold(self, graph: Graph, known: dict[Value, Array]) -> dict[Value, Value]:
        """Return a Constant's output for each folded value; adds all their arrays to ``known``."""
        replaced: dict[Value, Value] = {}
        for value in graph.captures:
            if value in known and value.uses:
                # The version of a user, so that the graph can be saved under the operator set that
                # it had.
                version = next((node.version for node in value.uses if not node.domain), 0)
                replaced[value] = _constant_node(value, known[value], version)
        for node in graph.nodes:
            constant = _constant(node.outputs[0]) if len(node.outputs) == 1 else None
            if constant is not None:
                known[node.outputs[0]] = constant
                continue
            results = self._evaluate(node, known)
            for value, array in zip(node.outputs, results, strict=False):
                if array is not None:
                    known[value] = array
                    replaced[value] = _constant_node(value, array, node.version)
        return replaced

    def _evaluate(self, node: Node, known: Mapping[Value, Array]) -> Sequence[Array | None]:
        """Return the arrays of a node's outputs; none if the node cannot be folded."""
        if operator_of(node).by_type:  # then the input need not be constant
            return _by_type(node)
        if node.domain or node.subgraph is not None or node.captures or is_random(node):
            return ()
        if node.op_type == "Constant" or any(isinstance(v, Graph) for v in node.attrs.values()):
            return ()
        # A node without inputs, such as a random one, is no function of constants.
        if not any(v is not None for v in node.inputs):
            return ()
        inputs = list(node.inputs)
        arrays = [None if v is None else known.get(v) for v in inputs]
        at = operator_of(node).dtype_at
        if at is not None and arrays[at] is None:
            arrays[at] = _of_same_dtype(inputs[at])
        if any(a is None and v is not None for a, v in zip(arrays, inputs, strict=True)):
            return ()
        if not self._fits(node, arrays):
            return ()
        try:
            results = evaluate(node, arrays)
        except SubgraphError:
            # Not an error yet: the node may be in a branch that is never taken.
            return ()
        if not all(isinstance(r, np.ndarray) and r.nbytes <= self.size_limit for r in results):
            return ()
        return results

    def _fits(self, node: Node, arrays: Sequence[Array | None]) -> bool:
        """Return whether inferred result sizes are within the limit, before any is computed."""
        types = [None if a is None else TensorType(dtype_of(a), a.shape) for a in arrays]
        try:
            found = infer_types(node, types, arrays)
        except SubgraphError:
            return False
        for type_ in found:
            if isinstance(type_, TensorType) and size_in_bytes(type_) > self.size_limit:
                return False
            static = isinstance(type_, TensorType) and type_.is_static
            if not static and operator_of(node).grows:
                return False
        return True


def _by_type(node: Node) -> Sequence[Array | None]:
    """Return the result of an operator such as Shape, which depends only on its input's type."""
    elements = propagate(node, [None], [None if v is None else v.type for v in node.inputs])
    return (to_array(elements, TensorType("int64")),)


def _of_same_dtype(value: Value | None) -> Array | None:
    """Return an array of the dtype of ``value``, None if the dtype is not known."""
    type_ = None if value is None else value.type
    return np.zeros((), numpy_dtype(type_.dtype)) if isinstance(type_, TensorType) else None


def _constant(value: Value) -> Array | None:
    """Return the array of a Constant node's output; None for any other value."""
    return None if value.producer is None else constant_array(value.producer)


def _constant_node(value: Value, array: Array, version: int) -> Value:
    """Return the output of a new Constant node that will replace ``value``.

    Args:
        value: The replaced value; its name and its node's name are reused.
        array: The constant.
        version: Version of the Constant; 0: unknown.
    """
    array = read_only(array)  # a view: the array may belong to another node or to a parameter
    node = Node("Constant", outputs=1, version=version or 13, attrs={"value": array})
    made = node.outputs[0]
    made.type = TensorType(dtype_of(array), array.shape)
    if value.producer is not None:
        made.name = value.name
        if len(value.producer.outputs) == 1:
            node.name = value.producer.name
    return made


@register_pass("ConstantsToParameters", operators=("Constant",))
@attrs.frozen
class ConstantsToParameters:
    """Replace Constant nodes by parameters, which can be assigned and are reformatted as weights.

    Attributes:
        min_size: Constants of fewer elements stay nodes.
        prefix: What names of the parameters begin with; names of values follow.
    """

    min_size: int = 0
    prefix: str = ""

    def __call__(self, graph: Graph) -> Graph:
        """Return a copy of ``graph``; a Constant that computes a graph output stays."""
        graph = graph.clone()
        names = Names(graph.parameters)
        for level in graph.levels():
            outputs = set(level.outputs)
            lifted: dict[Value, Value] = {}
            for node in level.nodes:
                array = _constant(node.outputs[0]) if len(node.outputs) == 1 else None
                if array is None or array.size < self.min_size or node.outputs[0] in outputs:
                    continue
                parameter = Parameter.adopt(names.fresh(self.prefix + node.outputs[0].name), array)
                lifted[node.outputs[0]] = Value(
                    node.outputs[0].name, parameter.type, parameter=parameter
                )
            level.rewire(lifted)
        return graph

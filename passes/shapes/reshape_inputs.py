"""The pass "ReshapeInputs", and `reshape`: a model for inputs of other sizes, or of any size.

An exported model often holds the sizes of its example inputs as constants, for example the batch
size 1 in the target of a Reshape. `subgraph.passes.shapes.constant_sizes` finds them and replaces
them by forms that follow the inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from subgraph.errors import MissingInputError, ModelError, ShapeError, require_type
from subgraph.graph.graph import Graph, Value
from subgraph.graph.types import Dim, TensorType, ValueType
from subgraph.operators.type_inference import Inference
from subgraph.system.registry import nearest
from subgraph.transform.pass_manager import apply_pass, register_pass

from .constant_sizes import adapted

Shapes = Mapping[str, Iterable[Dim] | int | str]
_log = logging.getLogger("subgraph")


def reshape(graph: Graph, shapes: Shapes | None = None, *, batch: int | str | None = None) -> Graph:
    """Return the graph for inputs of other shapes, as OpenVINO's ``reshape`` and ``set_batch`` do.

    Sizes of the present inputs that the model holds as constants are adapted: targets of Reshape,
    operands of Concat, initial states of recurrent operators, sizes of Resize, indices of Gather.
    Constants in the bodies of control flow are not.

    Args:
        graph: The graph; it is not changed.
        shapes: The new shape by the name of an input, such as ``("N", 3, 224, 224)``: numbers,
            names or None (unknown); or the new size by the name of a symbolic dimension.
        batch: New first dimension of every input that ``shapes`` does not name and that has one.

    Raises:
        MissingInputError: a name is neither that of an input nor of a symbolic dimension.
        ShapeError: a shape has another rank than the input, the graph is partitioned, or a node
            does not fit the new sizes; the message names it.
    """
    require_type(graph, Graph, ModelError, "a graph, as sg.load returns")
    return apply_pass(graph, ReshapeInputs(dict(shapes or {}), batch))


@register_pass("ReshapeInputs")
@attrs.frozen(eq=False)
class ReshapeInputs:
    """Change the shapes of inputs; see `reshape`.

    Attributes:
        shapes: New shapes by input, and new sizes by symbolic dimension.
        batch: New first dimension of all other inputs.
    """

    shapes: Shapes = attrs.field(factory=dict[str, Any])
    batch: int | str | None = None

    def __call__(self, graph: Graph) -> Graph:
        """Return a copy of ``graph`` for the new shapes."""
        types = self._types(graph)
        found = adapted(graph, {v: new for v, new in types.items() if new != v.type})
        graph = found.graph
        new = {value.name: type_ for value, type_ in types.items()}
        changed = {v: v.type for v in graph.inputs if v.type != new[v.name]}
        for value in changed:
            value.type = new[value.name]
        shown = ", ".join(f"{value.name!r} as {value.type}" for value in changed)
        try:
            Inference(graph, True, set(graph.inputs), {}, changed).run()
        except ShapeError as error:
            error.add_note(f"in model {graph.name!r} with {shown}")
            raise
        if found.misfit:
            _log.warning("%r with %s may not fit all sizes: %s", graph.name, shown, found.misfit)
        found.set_sizes(graph)
        return graph

    def _types(self, graph: Graph) -> dict[Value, ValueType | None]:
        """Return the new type of every input."""
        inputs = {value.name: value for value in graph.inputs}
        names = {
            dim
            for value in graph.inputs
            if isinstance(value.type, TensorType)
            for dim in value.type.shape or ()
            if isinstance(dim, str)
        }
        sizes: dict[str, Dim] = {}
        for name, new in self.shapes.items():
            if name in inputs:
                continue
            if name not in names:
                known = [*inputs, *sorted(names)]
                raise MissingInputError(
                    f"{name!r} is neither an input of {graph.name!r} nor a symbolic dimension of "
                    f"one; {nearest(name, known)}"
                )
            if not isinstance(new, (int, str)):
                raise ShapeError(
                    f"dimension {name!r}: its new size is a number or name; got {new!r}"
                )
            sizes[name] = new
        return {value: self._type(value, sizes) for value in graph.inputs}

    def _type(self, value: Value, sizes: Mapping[str, Dim]) -> ValueType | None:
        """Return the new type of an input; ``sizes`` has new ones by symbolic dimension."""
        old, new = value.type, self.shapes.get(value.name)
        if not isinstance(old, TensorType):
            if new is not None:
                raise ShapeError(f"input {value.name!r} is {old}, which has no shape")
            return old
        if new is None:
            if old.shape is None:
                return old
            dims: list[Dim] = [sizes.get(d, d) if isinstance(d, str) else d for d in old.shape]
            if self.batch is not None and dims and value.parameter is None:
                dims[0] = self.batch
            return TensorType(old.dtype, dims)
        if isinstance(new, (int, str)):
            raise ShapeError(f"input {value.name!r}: a shape is a list of dimensions; got {new!r}")
        type_ = TensorType(old.dtype, tuple(new))
        if value.parameter is not None and type_ != old:
            raise ShapeError(
                f"input {value.name!r} has a default of {old}; its shape cannot change to {type_}"
            )
        if old.rank not in (None, type_.rank):
            raise ShapeError(
                f"input {value.name!r} is {old}, which cannot become {type_}: "
                "the number of dimensions stays the same"
            )
        return type_

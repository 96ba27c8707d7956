"""The types of plans: steps, options, and the interface of a plan in progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import attrs
import numpy as np

from subgraph.engine.planner.layouts import LayoutAssigner
from subgraph.engine.planner.lowering import Lowering
from subgraph.engine.planner.operands import EmittedStep, Operand, Storage
from subgraph.errors import ShapeError
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.parameters import Versions
from subgraph.graph.types import Array, TensorType, dtype_of, numpy_dtype
from subgraph.operators.reference import evaluate
from subgraph.operators.subgraph_op import DefaultSubgraphOp


@attrs.frozen(eq=False)
class ReferenceStep:
    """A node that no lowering accepted, and that the reference runs between the compiled steps.

    Attributes:
        node: The node.
        inputs: Operands of its inputs, None where one is omitted.
        outputs: Operands of its outputs.
        reason: Why no lowering accepted it.
    """

    node: Node
    inputs: tuple[Operand | None, ...]
    outputs: tuple[Operand, ...]
    reason: str

    def compute(self, arrays: Sequence[Array | None]) -> list[tuple[Operand, Array]]:
        """Compute the node by the reference.

        Args:
            arrays: The arrays of its inputs.

        Returns:
            The operands of its outputs that have elements, with their arrays in C order.

        Raises:
            ShapeError: A result has another type than planned, for which no memory is reserved.
        """
        if self.node.subgraph is not None:
            results: Sequence[Any] = DefaultSubgraphOp(self.node.subgraph).forward(list(arrays))
        else:
            results = evaluate(self.node, arrays)
        found: list[tuple[Operand, Array]] = []
        for operand, result in zip(self.outputs, results, strict=True):
            array = np.asarray(result)
            if TensorType(dtype_of(array), array.shape) != operand.type:
                raise ShapeError(
                    f"node {self.node.name!r} ({self.node.op_type}): output {operand.name!r} is "
                    f"planned as {operand.type}, but it is {array.dtype}{list(array.shape)}"
                )
            if operand.size:
                found.append((operand, np.ascontiguousarray(array, numpy_dtype(operand.dtype))))
        return found


Item = EmittedStep | ReferenceStep


@attrs.frozen
class PlanOptions:
    """Everything that a plan depends on beside the graph and the shapes.

    Attributes:
        threads: Largest number of threads that run a step.
        blocked: Whether convolutions may use the blocked layout.
        properties: The device's configuration, which lowerings read as `Lowering.options`.
        lowering: The device's class of `Lowering`, which selects its kernels.
    """

    threads: int = 1
    blocked: bool = True
    properties: Mapping[str, Any] = attrs.field(factory=dict[str, Any])
    lowering: type[Lowering] = Lowering


@attrs.frozen(eq=False)
class Plan:
    """Steps over placed memory.

    Attributes:
        graph: The graph that was planned.
        items: Steps in order.
        inputs: Operand of each graph input, None for weights.
        outputs: Operand of each graph output.
        offsets: Offset of each root storage in the arena, in bytes.
        arena_bytes: Size of the arena.
        versions: Parameters whose content decided the plan, with the versions that were read.
        reorders: Number of layout conversions that move data.
        in_place: Number of outputs that overwrite an input.
    """

    graph: Graph
    items: tuple[Item, ...]
    inputs: tuple[Operand | None, ...]
    outputs: tuple[Operand, ...]
    offsets: dict[Storage, int]
    arena_bytes: int
    versions: Versions
    reorders: int
    in_place: int


class UnknownShapeError(ShapeError):
    """A shape, or the algorithm of a node, depends on unknown values.

    Attributes:
        node: The node that cannot be planned.
        inputs: Positions of graph inputs whose values would make planning possible; empty if the
            region itself computes the unknown values.
        of_all_contents: Whether a plan may be made for every value of these inputs. False if they
            seem to select one of few branches: their values are then counted.
    """

    of_all_contents: ClassVar[bool] = True

    def __init__(self, node: Node, inputs: Sequence[int]) -> None:
        self.node = node
        self.inputs = tuple(inputs)
        super().__init__(
            f"node {node.name!r} ({node.op_type}): the shape of its output, or how it is computed, "
            "follows from values that are only known at run time"
        )


class PlanInProgress(Protocol):
    """The interface of a plan in progress, for functions that plan a part of it.

    Attributes:
        graph: The graph.
        operands: The operands of the values that are planned.
        known_elements: Elements that are known of the first outputs of planned nodes, None if
            none are. Those of other values are in `Operand.known`.
        items: The steps so far.
        layouts: Assigns and converts layouts.
    """

    graph: Graph
    operands: dict[Value, Operand]
    known_elements: dict[Value, Array | None]
    items: list[Item]
    layouts: LayoutAssigner

    def operand(self, value: Value) -> Operand:
        """Return the operand of a value."""
        ...

    def add(self, node: Node) -> None:
        """Plan one node; all nodes before it are planned."""
        ...


def constant(name: str, array: Array, dtype: str | None = None) -> Operand:
    """Return the operand of a constant of the plan.

    Args:
        name: The value's name.
        array: Its content; an array of objects may contain symbolic integers.
        dtype: Its dtype; None: that of the array, which then is not of objects.
    """
    array = np.ascontiguousarray(array).reshape(array.shape)
    operand = Operand(name, dtype or array.dtype.name, array.shape, known=array)
    operand.storage = Storage("constant", operand.nbytes, content=array)
    return operand


def storages_of(item: Item) -> list[Storage]:
    """Return the storages that a step reads or writes."""
    arguments: Sequence[Any]
    arguments = item.arguments if isinstance(item, EmittedStep) else (*item.inputs, *item.outputs)
    found: list[Storage] = []
    for argument in arguments:
        storage = None if isinstance(argument, (int, float)) else getattr(argument, "storage", None)
        if storage is not None:
            found.append(storage)
    return found

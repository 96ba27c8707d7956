"""If, Loop, Scan, SequenceMap and others for the default executor, by executors of their bodies.

The inputs of each runner are the node's inputs followed by its captures, and its results are the
node's outputs. The inputs of a body are its own inputs followed by its captures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from subgraph.errors import ShapeError, UnsupportedOpError
from subgraph.graph.graph import Graph, Node
from subgraph.graph.limits import check_memory, memory_limit
from subgraph.graph.types import Array, SequenceType, TensorType, dtype_of, numpy_dtype
from subgraph.operators.bodies import captures_of, check_bodies, check_input_values
from subgraph.operators.inference import scanned_inputs
from subgraph.operators.subgraph_op import RunIterations, Wiring

Run = Callable[[Sequence[Any]], Sequence[Any]]


def is_nested(graph: Graph) -> bool:
    """Return whether a graph has nodes with bodies, or sequences."""
    return any(
        (node.attrs and node.bodies) or any(type(v.type) is SequenceType for v in node.outputs)
        for node in graph.nodes
    )


def is_branching(node: Node) -> bool:
    """Return whether a node is an If."""
    return node.op_type == "If" and not node.domain


class BodyExecutor(Protocol):
    """Runs a body of a node."""

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run the body once on its inputs and captures."""
        ...

    def iterations(self, wiring: Wiring) -> RunIterations | None:
        """Return a callable that runs many iterations of the body; None if it has none."""
        ...


def control_flow(node: Node, bodies: Sequence[BodyExecutor]) -> Run:
    """Return a callable that runs a node with bodies.

    Args:
        node: The node.
        bodies: The executors of its bodies, in the order of its attributes.

    Raises:
        UnsupportedOpError: The operator is not one of the standard that have bodies.
    """
    check_bodies(node)
    match (node.domain, node.op_type):
        case ("", "If"):
            return _If(node, bodies)
        case ("", "Loop"):
            return _Loop(node, bodies[0])
        case ("", "Scan"):
            return _ScanBatch(node, bodies[0]) if node.version == 8 else _Scan(node, bodies[0])
        case ("", "SequenceMap"):
            return _SequenceMap(node, bodies[0])
        case ("ai.onnx.preview", "FlexAttention"):
            from subgraph.runtime.flex_attention import flex_attention

            return flex_attention(node, [body.run for body in bodies])
        case ("com.microsoft", "BeamSearch" | "GreedySearch" | "Sampling" | "WhisperBeamSearch"):
            from subgraph.runtime.generation.search import generation

            return generation(node, [body.run for body in bodies])
        case _:
            raise UnsupportedOpError(
                f"node {node.name!r}: operator {node.domain}.{node.op_type} has bodies, and the "
                "default executor knows only If, Loop, Scan and SequenceMap; let a subgraph op "
                "of your own run it"
            )


def _truth_value(value: Any, node: Node) -> bool:
    """Return the condition of a node, an array of one element, as a bool.

    Raises:
        ShapeError: the value is not one truth value.
    """
    if type(value) is np.ndarray and value.size == 1 and value.dtype == np.bool_:
        return bool(value.item())
    array = np.asarray(value)
    if array.size != 1 or array.dtype != np.bool_:
        raise ShapeError(
            f"node {node.name!r} ({node.op_type}): its condition has shape {list(array.shape)} and "
            f"dtype {array.dtype}; it must hold one truth value"
        )
    return bool(array.reshape(())[()])


def _stacked(parts: Sequence[Any] | Array, body: Graph, position: int, axis: int = 0) -> Array:
    """Return the results of all iterations along a new axis; empty if there was none.

    Args:
        parts: The results of the iterations, or an array of all of them.
        body: The body.
        position: Position of the output among those of the body.
        axis: The new axis.
    """
    if isinstance(parts, np.ndarray):
        # A compiled loop writes the results of iterations along the first axis.
        return np.ascontiguousarray(np.moveaxis(parts, 0, axis) if axis else parts)
    if parts:
        return np.stack(parts, axis)
    type_ = body.outputs[position].type
    if not isinstance(type_, TensorType):
        return np.empty((0,), np.float32)
    dims = [d if isinstance(d, int) else 0 for d in type_.shape or ()]
    dims.insert(axis % (len(dims) + 1), 0)
    return np.empty(dims, numpy_dtype(type_.dtype))


class _If:
    """Runs the branch that the condition selects."""

    def __init__(self, node: Node, bodies: Sequence[BodyExecutor]) -> None:
        self._node = node
        spans = zip(captures_of(node, first=1).items(), bodies, strict=True)
        self._branches = {key: (body, captures) for (key, captures), body in spans}

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        taken = _truth_value(inputs[0], self._node)
        body, captures = self._branches["then_branch" if taken else "else_branch"]
        return body.run(inputs[captures])


class _Repeated:
    """Runs a body several times.

    Attributes:
        node: The node.
        body: Runs the body on its inputs and captures.
        graph: The body.
        inputs: Number of inputs of the node, which captures follow.
    """

    def __init__(self, node: Node, body: BodyExecutor) -> None:
        self.node = node
        self.body = body
        self.graph = node.bodies[0]
        self.inputs = len(node.inputs)


class _Results:
    """Outputs of a body in all iterations so far.

    Attributes:
        outputs: The items of each output.
    """

    def __init__(self, node: Node, count: int) -> None:
        self.outputs: list[list[Any]] = [[] for _ in range(count)]
        self._node = node
        self._held = 0  # bytes

    def append(self, items: Sequence[Any], iterations: int) -> None:
        """Append the outputs of an iteration, or rows of those of several.

        Args:
            items: An item for each output.
            iterations: Number of iterations so far, for the message.

        Raises:
            LimitError: there is no memory for the results and their stack.
        """
        for output, item in zip(self.outputs, items, strict=True):
            output.append(item)
            self._held += int(item.nbytes)
        # The parts and their stack exist at the same time.
        if 2 * self._held > memory_limit():
            where = f"node {self._node.name!r} ({self._node.op_type})"
            what = f"{where}: to stack the {iterations} results of its body so far"
            check_memory(2 * self._held, what)


class _Loop(_Repeated):
    """Runs iterations while limit and condition allow: all by one call if the body can."""

    def __init__(self, node: Node, body: BodyExecutor) -> None:
        super().__init__(node, body)
        self._carried = self.inputs - 2
        first = 1 + self._carried
        self._run_iterations = body.iterations(
            Wiring(
                number=0,
                # A body that returns its condition unchanged never ends the loop, so that a
                # compiled loop need not read it.
                condition=None if self.graph.outputs[0] is self.graph.inputs[1] else 0,
                states=tuple((1 + k, 2 + k) for k in range(self._carried)),
                items=(),
                scans=tuple(range(first, len(self.graph.outputs))),
            )
        )

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        check_input_values(self.node, inputs[: self.inputs])
        limit = None if inputs[0] is None else int(np.asarray(inputs[0]).reshape(-1)[0])
        going = inputs[1] is None or _truth_value(inputs[1], self.node)
        carried = list(inputs[2 : self.inputs])
        captures = inputs[self.inputs :]
        # The body's condition input is true in every iteration that runs.
        number, true = 0, np.array(True)
        if self._run_iterations is not None and going and (limit is None or limit > 0):
            items = [np.array(0, np.int64), true, *carried, *captures]
            done = self._run_iterations(items, limit)
            if done is not None:
                return done.states + done.scans
        first = 1 + self._carried
        scans = _Results(self.node, len(self.graph.outputs) - first)
        while going and (limit is None or number < limit):
            results = self.body.run([np.array(number, np.int64), true, *carried, *captures])
            number += 1
            going = _truth_value(results[0], self.node)
            for before, after in zip(carried, results[1:first], strict=True):
                # ONNX requires that the dtype of a loop-carried value does not change, while its
                # shape may.
                if getattr(before, "dtype", None) != getattr(after, "dtype", None):
                    _check_dtype(self.node, before, after)
            # The first output of a body is its condition, the next ones are the carried values, the
            # last ones are stacked.
            carried = list(results[1:first])
            if scans.outputs:
                scans.append(results[first:], number)
        return carried + [_stacked(p, self.graph, first + k) for k, p in enumerate(scans.outputs)]


def _check_dtype(node: Node, before: Any, after: Any) -> None:
    """Raise ShapeError if a state, before and after an iteration, is an array of another dtype."""
    if type(before) is type(after) is np.ndarray:
        raise ShapeError(
            f"node {node.name!r} ({node.op_type}): an iteration begins with {dtype_of(before)} and "
            f"ends with {dtype_of(after)}; both must be the same"
        )


def _rows(array: Array, axis: int, back: int) -> Array:
    """Return an array's items along an axis as rows, the last one first if ``back``."""
    rows = np.moveaxis(array, axis, 0) if axis else array
    return rows[::-1] if back else rows


class _Scan(_Repeated):
    """Scan since opset 9."""

    def __init__(self, node: Node, body: BodyExecutor) -> None:
        super().__init__(node, body)
        self._scanned = scanned_inputs(node, self.inputs)
        self._states = self.inputs - self._scanned
        produced = len(self.graph.outputs) - self._states
        attrs = node.attrs
        self._in_axes = tuple(attrs.get("scan_input_axes") or (0,) * self._scanned)
        self._in_back = tuple(attrs.get("scan_input_directions") or (0,) * self._scanned)
        self._out_axes = tuple(attrs.get("scan_output_axes") or (0,) * produced)
        self._out_back = tuple(attrs.get("scan_output_directions") or (0,) * produced)
        self._run_iterations = body.iterations(
            Wiring(
                number=None,
                condition=None,
                states=tuple((k, k) for k in range(self._states)),
                items=tuple(range(self._states, self.inputs)),
                scans=tuple(range(self._states, len(self.graph.outputs))),
            )
        )

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        check_input_values(self.node, inputs[: self.inputs])
        states = list(inputs[: self._states])
        scanned = [
            _rows(array, axis, back)
            for array, axis, back in zip(
                inputs[self._states : self.inputs], self._in_axes, self._in_back, strict=True
            )
        ]
        states, parts = self.scan(states, scanned, inputs[self.inputs :])
        outputs = [
            _stacked(p[::-1] if back else p, self.graph, self._states + k, axis)
            for k, (p, axis, back) in enumerate(
                zip(parts, self._out_axes, self._out_back, strict=True)
            )
        ]
        return states + outputs

    def scan(
        self, states: list[Any], scanned: Sequence[Array], captures: Sequence[Any]
    ) -> tuple[list[Any], Sequence[Sequence[Any] | Array]]:
        """Return the last states, and for each scan output the results of all iterations.

        Args:
            states: The initial states.
            scanned: The inputs whose items the iterations read, along their first axis.
            captures: The values that the body captures.
        """
        length = min(map(len, scanned))
        # Without iterations, the shapes of results follow from the body's types (`_stacked`).
        # Inputs of unequal lengths are an error, which the loop below raises.
        if self._run_iterations is not None and length > 0 and len({*map(len, scanned)}) == 1:
            done = self._run_iterations([*states, *scanned, *captures], length)
            if done is not None:
                return done.states, done.scans
        parts = _Results(self.node, len(self.graph.outputs) - self._states)
        for number, items in enumerate(zip(*scanned, strict=True), 1):
            results = self.body.run([*states, *map(np.asarray, items), *captures])
            states = list(results[: self._states])
            parts.append(results[self._states :], number)
        return states, parts.outputs


class _ScanBatch(_Repeated):
    """Scan of opset 8: a batch axis before the scanned one, and lengths for each row."""

    def __init__(self, node: Node, body: BodyExecutor) -> None:
        super().__init__(node, body)
        self._scanned = scanned_inputs(node, self.inputs - 1)
        self._states = self.inputs - 1 - self._scanned
        self._back = tuple(node.attrs.get("directions") or (0,) * self._scanned)
        # Since opset 9 Scan has no batch axis and no lengths: each row of the batch is one such
        # Scan.
        inner = Node("Scan", node.inputs[1:], version=9, attrs=node.attrs)
        self._scan = _Scan(inner, body)

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        check_input_values(self.node, inputs[: self.inputs])
        captures = inputs[self.inputs :]
        states = inputs[1 : 1 + self._states]
        scanned = inputs[1 + self._states : self.inputs]
        longest = scanned[0].shape[1]
        rows = scanned[0].shape[0]
        # Opset 8 pads every row to the longest one; the body runs on the valid part only.
        lengths = [longest] * rows if inputs[0] is None else [int(n) for n in inputs[0]]
        last: list[list[Any]] = []
        stacked: list[list[Array]] = []
        for row, length in enumerate(lengths):
            items = [
                array[row, :length][:: -1 if back else 1]
                for array, back in zip(scanned, self._back, strict=True)
            ]
            state, parts = self._scan.scan([s[row] for s in states], items, captures)
            last.append(state)
            outputs = (_stacked(p, self.graph, self._states + k) for k, p in enumerate(parts))
            # Rows may have different lengths, and the batch is stacked to one array.
            stacked.append([_padded(array, longest) for array in outputs])
        if not rows:
            # Without rows the shapes of results follow from the body's types.
            scans = range(self._states, len(self.graph.outputs))
            items = [_stacked((), self.graph, k) for k in scans]
            empty = [np.empty((0, longest, *item.shape[1:]), item.dtype) for item in items]
            return [*(np.array(state) for state in states), *empty]
        columns = (*zip(*last, strict=True), *zip(*stacked, strict=True))
        return [np.stack(column) for column in columns]


def _padded(array: Array, length: int) -> Array:
    """Return an array extended by zeros along its first axis."""
    missing = length - array.shape[0]
    return np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1)) if missing else array


class _SequenceMap(_Repeated):
    """Runs the body on every item of the sequences; other inputs are the same for all items."""

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        results = _Results(self.node, len(self.graph.outputs))
        # Inputs that are not sequences stay in this list for all items.
        items = list(inputs)
        sequences = [k for k in range(self.inputs) if isinstance(items[k], (list, tuple))]
        lengths = [len(inputs[k]) for k in sequences]
        if len(set(lengths)) > 1:
            raise ShapeError(
                f"node {self.node.name!r} (SequenceMap): its sequences have {lengths} items; all "
                "must have the same number"
            )
        for number in range(len(inputs[0])):
            for k in sequences:
                items[k] = inputs[k][number]
            results.append(self.body.run(items), number + 1)
        return results.outputs

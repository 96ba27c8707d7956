"""Single operators with valid operands and attributes, from ONNX's backend test suite.

A sample is a template of random graphs (`subgraph.testing.graph_templates`). Only the modules of
the suite that mention the wanted operators are imported.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from hypothesis import strategies as st

import subgraph as sg
from subgraph.errors import SubgraphError
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.types import Array
from subgraph.operators.builder import operator
from subgraph.operators.reference import evaluate
from subgraph.operators.schema import get_schema
from subgraph.testing.graph_templates import Apply, Draw, Pool

ANY, WEIGHT, FIXED = "any", "weight", "fixed"  # roles of operands, see `Sample`
_MAX_ELEMENTS = 4000  # of all operands of a sample, so that it runs in milliseconds (estimate)
_MAX_SAMPLES = 16  # of one operator


@attrs.frozen(eq=False)
class Sample:
    """A node of the suite with valid operands.

    Attributes:
        node: The node, with its attributes and version.
        arrays: Its operands, None for an omitted one.
        roles: For each operand ANY (any float32 values of this shape: a graph input, a result or a
            weight), WEIGHT (a weight with these values, which may be scaled) or FIXED (a constant
            with exactly these values).
    """

    node: Node
    arrays: Sequence[Array | None]
    roles: Sequence[str]

    def __call__(self, draw: Draw, pool: Pool, name: str) -> Any:
        """Apply the operator to values of the pool, weights and new graph inputs."""
        given = [self._operand(draw, pool, k) for k in range(len(self.arrays))]
        node = self.node
        return operator(node.op_type, node.domain)(
            *given, outputs=len(node.outputs), version=node.version, **node.attrs
        )

    def _operand(self, draw: Draw, pool: Pool, position: int) -> Value | None:
        array, role = self.arrays[position], self.roles[position]
        if array is None:
            return None
        if role == FIXED:
            found: Value = sg.ops.Constant(value=array)
            return found
        if role == ANY:
            source = draw(st.sampled_from(["result", "input", "weight"]))
            found_like = pool.like(draw, array.shape, "float32") if source == "result" else None
            if found_like is not None:
                return found_like
            if source != "weight" or position == 0:
                value = pool.feed(array.shape)
                pool.values.append(value)
                return value
        pool.weights += 1
        return sg.parameter(f"w{pool.weights}", array)


def samples(op_types: Sequence[str]) -> Mapping[str, Apply]:
    """Return the samples of these operators of ONNX's own domain, named "Operator#number"."""
    table: dict[str, Apply] = {}
    for op_type in op_types:
        for number, sample in enumerate(_samples(op_type)):
            table[f"{op_type}#{number}"] = sample
    return table


@cache
def _samples(op_type: str) -> tuple[Sample, ...]:
    import onnx.backend.test.case.node as suite

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for path in sorted(Path(suite.__file__).parent.glob("*.py")):
            # Importing the whole suite computes some 2,000 cases and takes seconds.
            if f'"{op_type}"' in path.read_text(encoding="utf-8"):
                import_module(f"{suite.__name__}.{path.stem}")
    found: list[Sample] = []
    every: list[Any] = vars(suite)["_NodeTestCases"]
    for case in every:
        nodes = case.model.graph.node
        if len(nodes) == 1 and nodes[0].op_type == op_type and not nodes[0].domain:
            sample = _sample(case)
            if sample is not None:
                found.append(sample)
    # Evenly spaced, because neighbouring cases of the suite are variants of each other.
    step = max(1, -(-len(found) // _MAX_SAMPLES))
    return tuple(found[::step])


def _sample(case: Any) -> Sample | None:
    """Return the sample of a case, None if it has other than numeric tensors or random results."""
    inputs = case.data_sets[0][0]
    plain = all(isinstance(array, (np.ndarray, np.generic)) for array in inputs)
    if not plain or sum(np.size(array) for array in inputs) > _MAX_ELEMENTS:
        return None
    try:
        graph = sg.load(case.model)
        (node,) = graph.nodes
        known = dict(zip((v.name for v in graph.inputs), map(np.asarray, inputs), strict=True))
        arrays = [None if v is None else known[v.name] for v in node.inputs]
    except (SubgraphError, ValueError, KeyError):
        return None
    attributes: list[Any] = list(node.attrs.values())
    if any(array is not None and array.dtype.kind not in "fiub" for array in arrays):
        return None
    if node.captures or any(isinstance(value, Graph) for value in attributes):
        return None
    # Two evaluations: a random operator would differ between the device and the reference as well.
    expected = _results(node, arrays)
    again = _results(node, arrays)
    if expected is None or again is None:
        return None
    if not all(np.array_equal(a, b) for a, b in zip(expected, again, strict=True)):
        return None  # random or NaN
    roles = [_role(node, arrays, position, expected) for position in range(len(arrays))]
    return Sample(node, arrays, roles)


def _results(node: Node, arrays: Sequence[Array | None]) -> list[Array] | None:
    try:
        with np.errstate(all="ignore"):
            results: list[Any] = list(evaluate(node, list(arrays)))
    except Exception:
        return None  # operands that the operator refuses
    plain = all(isinstance(result, (np.ndarray, np.generic)) for result in results)
    return [np.asarray(result) for result in results] if plain else None


def _role(
    node: Node, arrays: Sequence[Array | None], position: int, expected: Sequence[Array]
) -> str:
    """Return the role of an operand: runs with other values must give results of equal shapes."""
    array = arrays[position]
    if array is None or array.dtype.kind != "f":
        return WEIGHT  # `check_property` changes float weights only

    def runs(numbers: Any, *, finite: bool = False) -> bool:
        other = list(arrays)
        other[position] = np.asarray(numbers).astype(array.dtype)
        results = _results(node, other)
        if results is None or [r.shape for r in results] != [r.shape for r in expected]:
            return False
        return not finite or all(np.isfinite(r).all() for r in results if r.dtype.kind == "f")

    names = get_schema(node.op_type, "", node.version).inputs
    shape: tuple[int, ...] = array.shape
    drawn = np.random.default_rng(0).uniform(-2, 2, shape)
    signed = "scale" not in names[min(position, len(names) - 1)]
    # Only the first operand may have values for which the result is NaN. Others could be such as a
    # variance, which must not be negative.
    if array.dtype == np.float32 and signed and runs(drawn, finite=position > 0):
        return ANY
    return WEIGHT if runs(array * 0.75) else FIXED

"""Honest graphs: samples one after another, operands of one computed from results of others."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import onnx

from subgraph.graph.types import Array
from wrong_sizes.runs import make_model, ours
from wrong_sizes.samples import OPSET, RANDOM, Operand, Sample, samples, since

_CONNECTED = 0.7  # share of operands that are connected where a value suits
_FROM_SHAPE = 0.3  # share of connected integers that are computed from a shape
_MAX_CONNECTED = 4096  # elements of an operand that is connected
_MAX_PARAMETERS = 8  # elements up to which floats may be parameters (scales, Range)
_OPSETS = {"": OPSET}
_CONNECTABLE = frozenset("fiub")  # kinds of dtypes


def graph_of(count: int, only: str, rng: np.random.Generator) -> Sample:
    """Return a sample that runs after ``count`` - 1 others, whose results it may take.

    Args:
        count: Number of samples.
        only: Operators to choose from, separated by commas; "" for all.
        rng: Random numbers.
    """
    groups = [group for group in samples(only) if _is_current(group[0])]
    graph = _Graph(rng)
    while len(graph.titles) < count:
        group = groups[int(rng.integers(len(groups)))]
        graph.append(group[int(rng.integers(len(group)))])
    *before, node = graph.nodes
    source = " after ".join(reversed(graph.titles[:-1]))
    return Sample(node, graph.given, _OPSETS, source, graph.types, tuple(before))


def _is_current(sample: Sample) -> bool:
    """Return whether a sample belongs to the operator set of graphs, and is not random."""
    node = sample.node
    if node.domain or node.op_type in RANDOM:
        return False
    return sample.version == since("", node.op_type, OPSET)


@attrs.define
class _Graph:
    """A graph that grows.

    Attributes:
        rng: Random numbers.
        titles: Operators of the samples.
        nodes: The nodes so far.
        given: Operands from outside, by name.
        types: Types of those that are no tensors.
        results: Arrays that nodes compute from the operands, by name.
    """

    rng: np.random.Generator
    titles: list[str] = attrs.field(factory=list[str])
    nodes: list[onnx.NodeProto] = attrs.field(factory=list[onnx.NodeProto])
    given: dict[str, Operand] = attrs.field(factory=dict[str, Operand])
    types: dict[str, onnx.TypeProto] = attrs.field(factory=dict[str, onnx.TypeProto])
    results: dict[str, Array] = attrs.field(factory=dict[str, Array])

    def append(self, sample: Sample) -> None:
        """Add the node of a sample, unless it does not run or has NaN or infinite operands."""
        if not all(map(_is_finite, sample.values.values())):
            return
        connected = {name: self._connect(value) for name, value in sample.values.items()}
        values = {
            name: sample.values[name] if made is None else self.results[made]
            for name, made in connected.items()
        }
        found = _run(sample.node, values, sample.types)
        if found is None:  # other numbers do not suit it
            connected, values = dict.fromkeys(sample.values), sample.values
            found = _run(sample.node, values, sample.types)
        if found is None:
            return
        prefix = f"s{len(self.titles)}"
        node = onnx.NodeProto()
        node.CopyFrom(sample.node)
        del node.input[:], node.output[:]
        for name in sample.node.input:
            node.input.append((connected.get(name) or f"{prefix}_{name}") if name else "")
        node.output.extend(f"{prefix}_{name}" if name else "" for name in sample.node.output)
        for name, made in connected.items():
            if made is None:
                self.given[f"{prefix}_{name}"] = values[name]
                if name in sample.types:
                    self.types[f"{prefix}_{name}"] = sample.types[name]
        named = [name for name in node.output if name]
        for name, value in zip(named, found, strict=True):
            if isinstance(value, np.ndarray):
                self.results[name] = value
        self.titles.append(sample.node.op_type)
        self.nodes.append(node)

    def _connect(self, value: Operand) -> str | None:
        """Return the name of a result that can stand for an operand; None if none is made."""
        if not isinstance(value, np.ndarray) or value.dtype.kind not in _CONNECTABLE:
            return None
        if not 0 < value.size <= _MAX_CONNECTED or self.rng.random() >= _CONNECTED:
            return None
        if value.dtype.kind == "f" and value.size <= _MAX_PARAMETERS:
            return None  # a size may follow from it, and no rounding may change it
        if value.dtype == np.int64 and self.results and self.rng.random() < _FROM_SHAPE:
            names = [n for n, array in self.results.items() if array.ndim >= value.size]
            if names:
                name = self._choice(names)
                shape = np.array(self.results[name].shape)
                return self._fitted(self._add("Shape", [name], shape), value)
        names = [
            name
            for name, array in self.results.items()
            if array.dtype == value.dtype and array.size >= value.size
        ]
        return self._fitted(self._choice(names), value) if names else None

    def _fitted(self, name: str, value: Array) -> str:
        """Return the name of a result of the shape of an operand, made from a named one.

        Integers and bools get the operand's values.
        """
        array = self.results[name]
        if array.shape != value.shape:
            if array.ndim != 1:
                array = array.reshape(-1)
                name = self._add("Reshape", [name, self._give(np.array([-1]))], array)
            if array.size != value.size:
                array = array[: value.size]
                bounds = [self._give(np.array([n])) for n in (0, value.size)]
                name = self._add("Slice", [name, *bounds], array)
            if array.shape != value.shape:
                array = array.reshape(value.shape)
                name = self._add(
                    "Reshape", [name, self._give(np.array(value.shape, np.int64))], array
                )
        if value.dtype == bool:
            return self._add("Xor", [name, self._give(array ^ value)], value)
        if value.dtype.kind == "f":
            return name
        with np.errstate(all="ignore"):
            return self._add("Add", [name, self._give(value - array)], value)

    def _add(self, op: str, operands: Sequence[str], result: Array) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(onnx.helper.make_node(op, operands, [name]))
        self.results[name] = result
        return name

    def _give(self, value: Array) -> str:
        name = f"g{len(self.given)}"
        self.given[name] = np.asarray(value)
        return name

    def _choice(self, names: Sequence[str]) -> str:
        return names[int(self.rng.integers(len(names)))]


def _is_finite(value: Operand) -> bool:
    return (
        not isinstance(value, np.ndarray)
        or value.dtype.kind != "f"
        or bool(np.isfinite(value).all())
    )


def _run(
    node: onnx.NodeProto, values: dict[str, Operand], types: dict[str, onnx.TypeProto]
) -> list[Operand] | None:
    """Return the results of a node on REFERENCE; None if it refuses the operands."""
    model = make_model([node], values, types, _OPSETS, lambda _: None)
    return ours("REFERENCE", model, [values])[0].results

"""Parts of a batch: how many rows a region of the CPU computes at a time.

A batch is computed layer by layer, so that values between layers of many rows leave the caches.
Parts of a few rows keep them there; but each part reads all weights, and its matrices have fewer
rows. A part therefore has as many rows as make reading weights cheap beside reading values, and a
region with many weights for few values runs as a whole. Rows must be proved to be independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs

from subgraph.engine.cpu.region_options import CpuRegionOptions
from subgraph.engine.planner.concrete_types import MAX_SHAPE_ELEMENTS, concrete
from subgraph.engine.region.region_op import Guards
from subgraph.graph.graph import Graph
from subgraph.graph.limits import size_in_bytes
from subgraph.graph.parameters import Parameter, Versions
from subgraph.graph.types import TensorType, dtype_of
from subgraph.operators.batch_axes import elementwise
from subgraph.operators.operator import is_view, operator_of
from subgraph.operators.type_inference import retype
from subgraph.system import host

# The number of rows for which sizes are computed, a prime, so that it divides those of rows alone.
_ROWS = 10007
# Bytes of weights for each byte of a row's values up to which parts are faster, and the rows of a
# part for each of these bytes; in float32, and where products run in bfloat16, which are so fast
# that memory decides (measured with 34 networks, 16 rows and one thread).
_MOST_WEIGHTS, _ROWS_PER_WEIGHTS = 0.7, 4
_MOST_WEIGHTS_BFLOAT16, _ROWS_PER_WEIGHTS_BFLOAT16 = 1.3, 2
# A region has parts if the values of a row are at least this many times the largest one, so that a
# layer reads what another one has written. The largest values of a part then fill one over
# _PARTS_OF_CACHE of the second cache: the call of a part takes about 5 us (estimates).
_LEAST_LAYERS, _PARTS_OF_CACHE = 2, 4
_CACHED_SHAPES = 64
# Shapes of rows of which sizes are computed; later ones run as a whole. A sequence that grows with
# every call would otherwise be typed again by each.
_MOST_ROW_SHAPES = 8

Types = Sequence[TensorType | None]
Shapes = tuple[tuple[int, ...], ...]


@attrs.frozen
class RowSizes:
    """Sizes in bytes on which the rows of a part depend.

    Attributes:
        weights: All weights.
        values: The values of one row between layers.
        largest: The largest of these values.
    """

    weights: int
    values: float
    largest: float

    def part(self, rows: int, options: CpuRegionOptions) -> int:
        """Return the rows of the parts that are expected to be the fastest, or all rows.

        Args:
            rows: All rows.
            options: How the region is run.
        """
        plan = options.plan
        if plan.threads > 1:
            # Threads wait for each other at every step, and more often in parts: with two threads
            # parts took 0.90 to 1.18 of the time (measured with 6 networks of 16 rows).
            return rows
        cache = host.caches().l2
        if rows * self.largest <= cache // 2:
            return rows  # the values of all rows stay in the cache
        if self.values < _LEAST_LAYERS * self.largest:
            return rows  # there is no second layer that reads values from the cache
        most, each = _MOST_WEIGHTS, _ROWS_PER_WEIGHTS
        if plan.properties.get("INFERENCE_PRECISION") == "bfloat16":
            most, each = _MOST_WEIGHTS_BFLOAT16, _ROWS_PER_WEIGHTS_BFLOAT16
        ratio = self.weights / self.values
        if ratio > most:
            return rows
        filling = cache / _PARTS_OF_CACHE / self.largest
        best: int = 2 ** round(math.log2(max(each * ratio, filling, 1)))
        return best if rows >= 2 * best else rows


def row_sizes(graph: Graph, types: Types, rows: int) -> RowSizes | None:
    """Return the sizes of weights and of a row's values; None if parts would gain nothing.

    Results of elementwise operators do not count, since they are fused with others, nor do views.
    Parts gain nothing if no node reads a value of another one, as in a Split alone; and in
    quantized regions, where most values are fused away, and products are so fast that weights
    decide.

    Args:
        graph: A region.
        types: Types of its inputs, None for weights.
        rows: The number of rows in these types; what is no multiple of it does not count.
    """
    typed, _ = retype(graph, types, strict=False)
    sizes, read = [1 / rows], False
    for node in typed.nodes:
        fused = is_view(node) or operator_of(node).batch is elementwise
        for value in () if fused else node.outputs:
            type_ = value.type
            if isinstance(type_, TensorType) and type_.is_static:
                if type_.dtype in ("int8", "uint8"):
                    return None
                if _count(type_) % rows == 0:
                    sizes.append(size_in_bytes(type_) // rows)
                    read = read or bool(value.uses)
    if not read:
        return None
    held = {value.parameter for value in typed.values() if value.parameter is not None}
    weights = sum(size_in_bytes(parameter.type) for parameter in held)
    return RowSizes(weights, sum(sizes), max(sizes))


def _count(type_: TensorType) -> int:
    """Return the number of elements of a static type."""
    return math.prod(concrete(type_))


class _Decisions:
    """The decisions for one content of the parameters on which they depend.

    Attributes:
        versions: The versions of these parameters.
        rows: The rows of each part by the shapes of a request.
        proof: The region for any number of rows, None if they are not proved to be independent;
            empty before the first attempt.
    """

    def __init__(self, read: Sequence[Parameter]) -> None:
        self.versions = Versions([(p, p.version) for p in read])
        self.rows: dict[Shapes, int] = {}
        self.proof: list[Graph | None] = []


class RowParts:
    """Decides how many rows of a request of a region run at a time."""

    def __init__(
        self,
        subgraph: Graph,
        positions: Sequence[int],
        parameters: Sequence[Parameter],
        options: CpuRegionOptions,
    ) -> None:
        """Prepare to decide; the proof is made when parts would be faster for the first time.

        Args:
            subgraph: The region.
            positions: Positions of its inputs that are not weights.
            parameters: All parameters of the region.
            options: How the region is run.
        """
        self._subgraph = subgraph
        self._positions = positions
        self._options = options
        # Shapes, axes and the like, on which a proof may depend.
        self._read = [
            p
            for p in parameters
            if "float" not in p.type.dtype and _count(p.type) <= MAX_SHAPE_ELEMENTS
        ]
        self._decisions = _Decisions(self._read)
        self._sizes: dict[Shapes, RowSizes | None] = {}

    def _current(self) -> _Decisions:
        """Return the decisions for the present content of parameters, at first none."""
        found = self._decisions
        # Requests that run at the same time may replace the decisions meanwhile.
        if not found.versions.are_current():
            found = self._decisions = _Decisions(self._read)
        return found

    def of(self, inputs: Sequence[Any]) -> int:
        """Return the rows of each part of a request, all rows if it runs as a whole.

        Args:
            inputs: Arrays for the inputs that are not weights; the first one has several rows.
        """
        shapes = tuple([item.shape for item in inputs])
        decisions = self._current()
        found = decisions.rows.get(shapes)
        if found is None:
            if len(decisions.rows) >= _CACHED_SHAPES:
                decisions.rows.clear()
            types = [TensorType(dtype_of(item), item.shape) for item in inputs]
            found = decisions.rows[shapes] = self._decide(types, decisions)
        return found

    def _decide(self, types: Sequence[TensorType], decisions: _Decisions) -> int:
        """Return the rows of each part of a request of new shapes."""
        rows = concrete(types[0])[0]
        if self._options.independent is None or rows < 2:
            return rows
        if any(concrete(type_)[:1] != (rows,) for type_ in types):
            return rows
        part = self._options.rows
        if not part:
            sizes = self._sizes_of(types, rows)
            part = rows if sizes is None else sizes.part(rows, self._options)
        return part if part < rows and self._independent(decisions) is not None else rows

    def _sizes_of(self, types: Sequence[TensorType], rows: int) -> RowSizes | None:
        """Return the sizes of rows; None if parts gain nothing, and after many other shapes."""
        key = tuple([concrete(type_)[1:] for type_ in types])
        if key not in self._sizes and len(self._sizes) < _MOST_ROW_SHAPES:
            given: list[TensorType | None] = [None] * len(self._subgraph.inputs)
            if self._fixed_types() != types:  # else the region has these types
                rows = _ROWS
                for k, type_ in zip(self._positions, types, strict=True):
                    given[k] = TensorType(type_.dtype, (rows, *concrete(type_)[1:]))
            self._sizes[key] = row_sizes(self._subgraph, given, rows)
        return self._sizes.get(key)

    def _fixed_types(self) -> list[TensorType] | None:
        """Return the types of the inputs that are not weights; None if one is not static."""
        types = [self._subgraph.inputs[k].type for k in self._positions]
        found = [type_ for type_ in types if isinstance(type_, TensorType) and type_.is_static]
        return found if found and len(found) == len(types) else None

    def _independent(self, decisions: _Decisions) -> Graph | None:
        """Return the region for any number of rows, if they are proved to be independent."""
        if not decisions.proof:
            independent = self._options.independent
            decisions.proof.append(None if independent is None else independent(self._subgraph))
        return decisions.proof[0]

    def form(self) -> tuple[Graph, Guards] | None:
        """Return the region for any number of rows, if its batch has a fixed size and parts.

        Returns:
            The graph, and the parameters whose content it depends on, with their versions; None if
            the region itself is to be fused.
        """
        types = self._fixed_types()
        if types is None or len(concrete(types[0])) == 0:
            return None
        rows = concrete(types[0])[0]
        decisions = self._current()
        if rows < 2 or self._decide(types, decisions) == rows:
            return None
        graph = self._independent(decisions)
        return None if graph is None else (graph, decisions.versions.read)

    def to_export(self) -> list[Any]:
        """Return the decisions as plain JSON."""
        return [[list(map(list, shapes)), rows] for shapes, rows in self._current().rows.items()]

    def restore(self, saved: Sequence[Any]) -> None:
        """Take the decisions of an exported model with the same options and weights."""
        for shapes, rows in saved:
            key: Shapes = tuple([tuple(shape) for shape in shapes])
            self._decisions.rows[key] = max(1, int(rows))

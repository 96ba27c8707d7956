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
from subgraph.graph.graph import Graph
from subgraph.graph.parameters import Parameter, Versions
from subgraph.graph.types import TensorType, dtype_of, numpy_dtype
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
_MOST_WEIGHTS_BFLOAT16, _ROWS_PER_WEIGHTS_BFLOAT16 = 1.6, 2
_MAX_SHAPE_ELEMENTS = 256  # of a parameter that may state a shape
_CACHED_SHAPES = 64
# Shapes of rows of which sizes are computed; later ones run as a whole. A sequence that grows with
# every call would otherwise be typed again by each.
_MOST_ROW_SHAPES = 8

Types = Sequence[TensorType | None]


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
        if rows * self.largest <= host.caches().l2 // 2:
            return rows  # the values of all rows stay in the cache
        plan = options.plan
        most, each = _MOST_WEIGHTS, _ROWS_PER_WEIGHTS
        if plan.properties.get("INFERENCE_PRECISION") == "bfloat16":
            most, each = _MOST_WEIGHTS_BFLOAT16, _ROWS_PER_WEIGHTS_BFLOAT16
        ratio = self.weights / self.values
        if ratio > most:
            return rows
        # Each thread has a cache, and has work for as many rows as one alone.
        best: int = plan.threads * 2 ** round(math.log2(max(each * ratio, 1)))
        return best if rows >= 2 * best else rows


def row_sizes(graph: Graph, types: Types, rows: int) -> RowSizes:
    """Return the sizes of weights and of a row's values.

    Results of elementwise operators do not count, since they are fused with others, nor do views.

    Args:
        graph: A region.
        types: Types of its inputs, None for weights.
        rows: The number of rows in these types; what is no multiple of it does not count.
    """
    typed, _ = retype(graph, types, strict=False)
    sizes = [1 / rows]
    for node in typed.nodes:
        fused = is_view(node) or operator_of(node).batch is elementwise
        for value in () if fused else node.outputs:
            type_ = value.type
            if isinstance(type_, TensorType) and type_.is_static:
                count = _count(type_)
                if count % rows == 0:
                    sizes.append(count // rows * numpy_dtype(type_.dtype).itemsize)
    held = {value.parameter for value in typed.values() if value.parameter is not None}
    weights = sum(_count(p.type) * numpy_dtype(p.type.dtype).itemsize for p in held)
    return RowSizes(weights, sum(sizes), max(sizes))


def _count(type_: TensorType) -> int:
    """Return the number of elements of a static type."""
    return math.prod(dim for dim in type_.shape or () if isinstance(dim, int))


def runs_in_parts(graph: Graph, options: CpuRegionOptions) -> bool:
    """Return whether a region with a batch of a fixed size would run in parts.

    Args:
        graph: The region; whether its rows are independent is not known.
        options: How it is run.
    """
    types = [value.type for value in graph.inputs if value.parameter is None]
    tensors = [type_ for type_ in types if isinstance(type_, TensorType) and type_.is_static]
    first = {type_.shape[0] if type_.shape else 0 for type_ in tensors}
    (rows, *others) = first or {0}
    if len(tensors) < len(types) or others or not isinstance(rows, int) or rows < 2:
        return False
    part = options.rows or row_sizes(graph, [None] * len(graph.inputs), rows).part(rows, options)
    return part < rows


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
            if "float" not in p.type.dtype and _count(p.type) <= _MAX_SHAPE_ELEMENTS
        ]
        self._proved: tuple[bool, Versions] | None = None
        self._rows: dict[tuple[tuple[int, ...], ...], int] = {}
        self._sizes: dict[tuple[tuple[int, ...], ...], RowSizes] = {}

    def of(self, inputs: Sequence[Any]) -> int:
        """Return the rows of each part of a request, all rows if it runs as a whole.

        Args:
            inputs: Arrays for the inputs that are not weights; the first one has several rows.
        """
        shapes = tuple([item.shape for item in inputs])
        if self._proved is not None and not self._proved[1].are_current():
            self._proved = None
            self._rows.clear()
        found = self._rows.get(shapes)
        if found is None:
            if len(self._rows) >= _CACHED_SHAPES:
                self._rows.clear()
            found = self._rows[shapes] = self._decide(inputs)
        return found

    def _decide(self, inputs: Sequence[Any]) -> int:
        """Return the rows of each part of a request of new shapes."""
        rows = int(inputs[0].shape[0])
        if self._options.dependence is None:
            return rows
        if not all(item.ndim and item.shape[0] == rows for item in inputs):
            return rows
        part = self._options.rows
        if not part:
            sizes = self._sizes_of(inputs)
            part = rows if sizes is None else sizes.part(rows, self._options)
        return part if part < rows and self._is_divisible() else rows

    def _sizes_of(self, inputs: Sequence[Any]) -> RowSizes | None:
        """Return the sizes of rows of these shapes; None if there were many other shapes."""
        key = tuple([item.shape[1:] for item in inputs])
        found = self._sizes.get(key)
        if found is None and len(self._sizes) < _MOST_ROW_SHAPES:
            types: list[TensorType | None] = [None] * len(self._subgraph.inputs)
            for k, item in zip(self._positions, inputs, strict=True):
                types[k] = TensorType(dtype_of(item), (_ROWS, *item.shape[1:]))
            found = self._sizes[key] = row_sizes(self._subgraph, types, _ROWS)
        return found

    def _is_divisible(self) -> bool:
        """Return whether rows are proved to be independent."""
        if self._proved is None:
            versions = Versions([(p, p.version) for p in self._read])
            dependence = self._options.dependence
            self._proved = dependence is not None and not dependence(self._subgraph), versions
        return self._proved[0]

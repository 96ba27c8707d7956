"""The operator "SegmentSum" of "subgraph.cpu": sums of rows from one offset to the next.

The pass "ReduceSegments" writes a loop over bags of rows as it (PyTorch's EmbeddingBag). Row ``b``
of ``SegmentSum(rows, offsets)`` is the sum of ``rows[offsets[b]:offsets[b + 1]]``, with the
attribute ``mean`` their mean; offsets are taken as Slice takes its ends, and the row is 0 where
both are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from subgraph.graph.graph import Node
from subgraph.graph.types import Array, TensorType, ValueType
from subgraph.operators.operator import reference, shape_rule
from subgraph.operators.requirements import Tensor, require, require_dtype, require_rank, requires
from subgraph.operators.schema import INTERNAL_DOMAIN


@requires("SegmentSum", domain=INTERNAL_DOMAIN)
def segment_sum_operands(node: Node, rows: Tensor, offsets: Tensor) -> None:
    """Raise ShapeError unless there are rows and offsets; those may lie anywhere."""
    require_rank("rows", rows, 2)
    require_rank("offsets", offsets, 1)
    require_dtype("offsets", offsets, "int64", "int32")
    require(offsets.shape[0] >= 1, "offsets are empty; the last one is an end")


@shape_rule("SegmentSum", domain=INTERNAL_DOMAIN)
def segment_sum(
    node: Node, types: Sequence[ValueType | None], values: Sequence[Array | None]
) -> list[ValueType | None]:
    """Give a row for each offset but the last."""
    rows, offsets = types
    if not isinstance(rows, TensorType) or not isinstance(offsets, TensorType):
        return [None]
    if rows.shape is None or offsets.shape is None:
        return [TensorType(rows.dtype)]
    ends = offsets.shape[0]
    return [TensorType(rows.dtype, (ends - 1 if isinstance(ends, int) else None, rows.shape[1]))]


@reference("SegmentSum", domain=INTERNAL_DOMAIN)
def summed(node: Node, inputs: Sequence[Any]) -> list[Array]:
    """Reduce each slice."""
    rows, offsets = inputs
    result = np.zeros((len(offsets) - 1, rows.shape[1]), rows.dtype)
    for bag, (begin, end) in enumerate(pairwise(offsets)):
        taken = rows[begin:end]
        if begin != end:
            result[bag] = taken.sum(0)
        if begin != end and node.attrs.get("mean", 0):
            with np.errstate(invalid="ignore"):
                result[bag] /= rows.dtype.type(len(taken))
    return [result]

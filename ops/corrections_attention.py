"""Attention: the types of all outputs, of which onnx infers some; raw scores without softcap.

And causal attention with a mask of one row for all queries: onnx.reference takes its rows for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph import Node
from subgraph.op import reference, shape_rule
from subgraph.reference import standard, variant
from subgraph.types import Dim, TensorType, ValueType

Array = np.ndarray[Any, Any]


def _times(a: Dim, b: Dim) -> Dim:
    return a * b if isinstance(a, int) and isinstance(b, int) else None


def _divided(a: Dim, b: int) -> Dim:
    return a // b if isinstance(a, int) else None


def _heads(type_: ValueType | None, count: Any) -> tuple[Dim, Dim, Dim, Dim] | None:
    """Return batch, heads, positions and size of a head, None if the rank is unknown."""
    if not isinstance(type_, TensorType) or type_.shape is None:
        return None
    if len(type_.shape) == 4:
        return type_.shape[0], type_.shape[1], type_.shape[2], type_.shape[3]
    if len(type_.shape) != 3 or not count:
        raise ShapeError(f"Attention takes 3 dimensions with numbers of heads, or 4; got {type_}")
    return type_.shape[0], int(count), type_.shape[1], _divided(type_.shape[2], int(count))


@shape_rule("Attention")
def attention(
    node: Node, types: Sequence[ValueType | None], values: Sequence[Array | None]
) -> Sequence[ValueType | None]:
    """Return the types of Y, the present keys and values, and the scores."""
    q = _heads(types[0], node.attrs.get("q_num_heads"))
    k = _heads(types[1], node.attrs.get("kv_num_heads"))
    v = _heads(types[2], node.attrs.get("kv_num_heads"))
    if q is None or k is None or v is None:
        return [None] * len(node.outputs)
    dtypes = [t.dtype if isinstance(t, TensorType) else "float32" for t in types[:3]]
    total = k[2]
    past = types[4] if len(types) > 4 else None
    if past is not None:
        before = past.shape[2] if isinstance(past, TensorType) and past.shape else None
        total = before + total if isinstance(before, int) and isinstance(total, int) else None
    rank = types[0].rank if isinstance(types[0], TensorType) else None
    shape = (q[0], q[1], q[2], v[3]) if rank == 4 else (q[0], q[2], _times(q[1], v[3]))
    return [
        TensorType(dtypes[0], shape),
        TensorType(dtypes[1], (k[0], k[1], total, k[3])),
        TensorType(dtypes[2], (v[0], v[1], total, v[3])),
        TensorType(dtypes[0], (q[0], q[1], q[2], total)),
    ][: len(node.outputs)]


@reference("Attention")
def all_results(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return Attention's results; the raw scores (mode 0) without the softcap."""
    inputs = list(inputs)
    if len(inputs) > 3 and inputs[3] is not None and node.attrs.get("is_causal", 0):
        mask, queries = inputs[3], inputs[0].shape[-2]
        inputs[3] = np.broadcast_to(mask, (*mask.shape[:-2], queries, mask.shape[-1]))
    results = list(standard(node, inputs))
    mode = int(node.attrs.get("qk_matmul_output_mode", 0))
    if len(results) > 3 and mode == 0 and float(node.attrs.get("softcap", 0.0)):
        without = variant(node, drop=("softcap",))
        results[3] = standard(without, inputs)[3]
    return results

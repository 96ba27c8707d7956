"""ConvTranspose for the reference: groups, and the pads that follow from ``output_shape``.

onnx.reference cuts the weights of groups along a wrong axis, pads nothing where the shape of the
output is given, and has no result for a batch of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.graph.graph import Node
from subgraph.operators.operator import reference
from subgraph.operators.reference import standard, variant

Array = np.ndarray[Any, Any]
_SHAPING = ("auto_pad", "output_padding", "output_shape", "pads")


@reference("ConvTranspose")
def conv_transpose(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the groups' transposed convolutions side by side."""
    if inputs[0].shape[0] == 0:
        one = np.zeros((1, *inputs[0].shape[1:]), inputs[0].dtype)
        return [conv_transpose(node, [one, *inputs[1:]])[0][:0]]
    wanted = node.attrs.get("output_shape")
    if wanted is None:
        return [_grouped(node, inputs)]
    x, weight = inputs[:2]
    rank = x.ndim - 2
    size = [int(n) for n in wanted][-rank:]
    whole = _grouped(variant(node, drop=_SHAPING), [x, weight])
    extra = [int(n) for n in node.attrs.get("output_padding") or [0] * rank]
    upper = node.attrs.get("auto_pad") in ("SAME_UPPER", b"SAME_UPPER")
    result = np.zeros((*whole.shape[:2], *size), whole.dtype)
    take, put = [slice(None)] * 2, [slice(None)] * 2
    for full, more, n in zip(whole.shape[2:], extra, size, strict=True):
        total = full + more - n
        before = total // 2 if upper else total - total // 2
        first, last = max(before, 0), min(before + n, full)
        take.append(slice(first, max(first, last)))
        put.append(slice(first - before, max(first, last) - before))
    result[tuple(put)] = whole[tuple(take)]
    if len(inputs) > 2 and inputs[2] is not None:
        result += inputs[2].reshape(-1, *[1] * rank)
    return [result]


def _grouped(node: Node, inputs: Sequence[Any]) -> Array:
    groups = int(node.attrs.get("group", 1))
    if groups == 1:
        only: Array = standard(node, inputs)[0]
        return only
    x, weight = inputs[:2]
    bias = inputs[2] if len(inputs) > 2 else None
    single = variant(node, group=1)
    each, made = x.shape[1] // groups, weight.shape[1]
    parts: list[Any] = []
    for g in range(groups):
        given = [x[:, g * each : (g + 1) * each], weight[g * each : (g + 1) * each]]
        given.append(None if bias is None else bias[g * made : (g + 1) * made])
        parts.append(standard(single, given[: len(inputs)])[0])
    return np.concatenate(parts, axis=1)

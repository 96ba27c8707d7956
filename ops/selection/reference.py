"""Unique, NonMaxSuppression and TopK for the REFERENCE device, where onnx.reference errs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.operators.reference import standard


def unique(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return distinct slices, the first index of each, the distinct slice of each slice, counts.

    Without an axis the slices are single elements. They are sorted, or in the order of their first
    appearance if ``sorted`` is 0.
    """
    axis = node.attrs.get("axis")
    y, first, inverse, counts = np.unique(inputs[0], True, True, True, axis=axis)
    if not node.attrs.get("sorted", 1):
        order = np.argsort(first)
        y, first, counts = np.take(y, order, axis or 0), first[order], counts[order]
        inverse = np.argsort(order)[inverse]
    numbers = (array.reshape(-1).astype(np.int64) for array in (first, inverse, counts))
    return [y, *numbers][: len(node.outputs)]


def non_max_suppression(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return (image, class, box) of the selected boxes, int64 [selected, 3]."""
    boxes, scores, *limits = inputs
    most, limit, least = ([*limits, None, None, None][k] for k in range(3))
    wanted = 0 if most is None else int(most.reshape(-1)[0])
    overlap = boxes.dtype.type(0 if limit is None else limit.reshape(-1)[0])
    centred = bool(node.attrs.get("center_point_box", 0))
    found: list[tuple[int, int, int]] = []
    for image in range(scores.shape[0]):
        corners = _corners(boxes[image], centred)
        for kind in range(scores.shape[1]):
            score = scores[image, kind]
            good = np.arange(len(score)) if least is None else np.flatnonzero(score > least)
            order = good[np.argsort(-score[good], kind="stable")]
            found += [(image, kind, box) for box in _picked(corners, order, overlap, wanted)]
    return [np.array(found, np.int64).reshape(-1, 3)]


def _corners(boxes: Array, centred: bool) -> Array:
    """Return the lower and the upper corner of each box, [boxes, 4]."""
    if centred:
        half = boxes[:, 2:] / 2
        return np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], 1)
    one, other = boxes[:, :2], boxes[:, 2:]
    return np.concatenate([np.minimum(one, other), np.maximum(one, other)], 1)


def _picked(corners: Array, order: Array, limit: Any, wanted: int) -> list[int]:
    """Return at most ``wanted`` boxes in order, except those that an earlier one suppresses."""
    picked: list[int] = []
    for box in order.tolist():
        if len(picked) >= wanted:
            break
        if not np.any(_shared(corners[box], corners[picked]) > limit):
            picked.append(box)
    return picked


def _shared(box: Array, others: Array) -> Array:
    """Return the intersection over union of a box with others; 0 for boxes without an area."""
    sides = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    common = sides[:, 0] * sides[:, 1]
    area = (box[2] - box[0]) * (box[3] - box[1])
    areas = (others[:, 2] - others[:, 0]) * (others[:, 3] - others[:, 1])
    real = (sides > 0).all(1) & (area > 0) & (areas > 0)
    return np.where(real, common / np.where(real, area + areas - common, 1), 0)


def top_k(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the largest or smallest elements; k may be a scalar, which onnx.reference refuses."""
    return standard(node, [inputs[0], *(k.reshape(1) for k in inputs[1:])])

"""STFT for the REFERENCE device, where onnx.reference fails; dynamic time warping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.operators.reference import standard


def stft(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Run STFT; ``frame_step`` and ``frame_length`` may be lists of one number.

    A signal without its last axis is real.
    """
    operands = list(inputs)
    if operands[0].ndim == 2:
        operands[0] = operands[0][..., None]
    for k in (1, 3):
        if k < len(operands) and operands[k] is not None:
            operands[k] = operands[k].reshape(())
    return standard(node, operands)


def time_warping(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return rows and columns of the path of least cost from the first element to the last one.

    The method, and which of several paths is returned, are those of Whisper's word timestamps
    (openai/whisper, timing.py): a step comes from the diagonal or from the row above if that is
    cheaper than both others, else from the column before.
    """
    costs: Array = inputs[0].reshape(inputs[0].shape[-2:])
    rows, columns = costs.shape
    if not costs.size:
        return [np.zeros((2, 0), np.int32)]
    # Sums and steps are stored by anti-diagonals: element (i, j) is at [i + j, i + 1]. Each depends
    # on the two anti-diagonals before it only.
    sums = np.full((rows + columns + 1, rows + 1), np.inf, np.float32)
    sums[0, 0] = 0.0
    from_diagonal, from_above = (np.zeros(sums.shape, bool) for _ in range(2))
    for k in range(rows + columns - 1):
        first, last = max(0, k - columns + 1), min(rows, k + 1)
        row: Array = np.array(range(first, last))
        diagonal, above, before = sums[k, first:last], sums[k + 1, first:last], sums[k + 1, row + 1]
        in_diagonal = (diagonal < above) & (diagonal < before)
        in_above = (above < diagonal) & (above < before)
        least = np.where(in_diagonal, diagonal, np.where(in_above, above, before))
        sums[k + 2, row + 1] = costs[row, k - row] + least
        from_diagonal[k + 2, row + 1], from_above[k + 2, row + 1] = in_diagonal, in_above
    path: list[tuple[int, int]] = []
    i, j = rows - 1, columns - 1
    while i >= 0 and j >= 0:
        path.append((i, j))
        if i and j and from_diagonal[i + j + 2, i + 1]:
            i, j = i - 1, j - 1
        elif j == 0 or (i and from_above[i + j + 2, i + 1]):
            i -= 1
        else:
            j -= 1
    return [np.array(path[::-1], np.int32).T]

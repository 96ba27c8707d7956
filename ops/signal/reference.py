"""STFT for the REFERENCE device, in the cases where onnx.reference fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from subgraph.graph.graph import Node
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

"""The shape rule of STFT: onnx's takes the whole spectrum where ``onesided`` has its default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph import Node
from subgraph.op import shape_rule
from subgraph.types import Dim, TensorType, ValueType

Array = np.ndarray[Any, Any]


@shape_rule("STFT")
def stft(
    node: Node, types: Sequence[ValueType | None], values: Sequence[Array | None]
) -> list[ValueType | None]:
    """Give ``[batch, frames, frequencies, 2]``."""
    signal = types[0]
    if not isinstance(signal, TensorType):
        return [None]
    shape = signal.shape or (None, None)
    if len(shape) not in (2, 3):
        raise ShapeError(f"the signal must have 2 or 3 dimensions, got {signal}")
    window = types[2] if len(types) > 2 else None
    size: Dim = shape[1]
    if len(types) > 3 and types[3] is not None:
        size = None if values[3] is None else int(values[3].reshape(-1)[0])
    elif isinstance(window, TensorType):
        size = window.shape[0] if window.shape else None
    frames: Dim = None
    results: Dim = None
    if isinstance(size, int):
        results = size // 2 + 1 if node.attrs.get("onesided", 1) else size
        hop = None if values[1] is None else int(values[1].reshape(-1)[0])
        if hop is not None and hop < 1:
            raise ShapeError(f"the step between frames must be at least 1, got {hop}")
        if isinstance(shape[1], int) and hop is not None:
            frames = max(0, 1 + (shape[1] - size) // hop)
    return [TensorType(signal.dtype, (shape[0], frames, results, 2))]

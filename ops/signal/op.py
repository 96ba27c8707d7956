"""DFT, STFT, windows, mel filters and time warping: requirements, and the output type of STFT.

onnx's rule for STFT takes the whole spectrum where ``onesided`` has its default, which is half.
MelWeightMatrix and ONNX Runtime's DynamicTimeWarping run on the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

from subgraph.graph.graph import Node
from subgraph.graph.types import Array, Dim, TensorType, ValueType
from subgraph.operators.batch_axes import along
from subgraph.operators.functions import declare_contributed
from subgraph.operators.operator import declare
from subgraph.operators.requirements import (
    Tensor,
    int_list,
    require,
    require_axes,
    require_dtype,
    require_rank,
    require_shape,
    require_single,
)
from subgraph.operators.schema import is_before

from . import reference


def dft_operands(
    node: Node, x: Tensor, length: Tensor | None = None, axis: Tensor | None = None
) -> None:
    """Raise ShapeError unless the input holds real or complex numbers along the axis (17 to 20).

    Args:
        node: The DFT node; before opset 20 the axis is an attribute.
        x: The signal; its last dimension is 1 (real) or 2 (complex).
        length: Length of the transform; None: the size of the axis.
        axis: The axis, not the last one; None: the default.
    """
    require(x.rank >= 2, "the input has shape {}; it needs two axes", list(x.shape))
    parts = x.shape[-1]
    require(1 <= parts <= 2, "the last axis has {} elements: 1 is real, 2 complex", parts)
    require_single("dft_length", length)
    for size in int_list(node, "dft_length", length) or []:
        require(size >= 1, "dft_length is {}; it must be at least 1", size)
    require_single("axis", axis)
    default = [1] if is_before(node, 20) else [-2]
    found = int_list(node, "axis", axis)
    for place in [] if found is None else require_axes(x.rank, found or default):
        require(place < x.rank - 1, "axis is {}, that of the numbers' parts", place)


def stft_operands(
    node: Node, x: Tensor, step: Tensor, window: Tensor | None = None, length: Tensor | None = None
) -> None:
    """Raise ShapeError unless frames lie within the signal and have the window's size (opset 17).

    Args:
        node: The STFT node.
        x: The signal, [batch, samples] or [batch, samples, 1 or 2].
        step: Samples from a frame to the next.
        window: A factor for each sample of a frame; None: none.
        length: Samples of a frame; None: the size of the window.
    """
    require_rank("signal", x, 2, 3)
    require(x.rank == 2 or 1 <= x.shape[2] <= 2, "the last axis is neither real nor complex")
    require_single("frame_step", step)
    require_single("frame_length", length)
    steps, found = int_list(node, "frame_step", step), int_list(node, "frame_length", length)
    require(all(hop >= 1 for hop in steps or ()), "frame_step is {}; at least 1", steps)
    if window is not None:
        require_rank("window", window, 1)
        found = found or [window.shape[0]]
    for size in found or ():
        require(1 <= size <= x.shape[1], "frames of {} in a signal of {}", size, x.shape[1])
        require_shape("window", window, (size,), "a number for each place of a frame")


def window_operands(node: Node, size: Tensor) -> None:
    """Raise ShapeError unless the size is a scalar of at least 1 (HannWindow etc., opset 17)."""
    require_rank("size", size, 0)
    require_dtype("size", size, "int64", "int32")
    for count in int_list(node, "size", size) or ():
        require(count >= 1, "size is {}; it must be at least 1", count)


def mel_operands(
    node: Node, bins: Tensor, length: Tensor, rate: Tensor, lower: Tensor, upper: Tensor
) -> None:
    """Raise ShapeError unless all operands are single numbers (ONNX MelWeightMatrix, opset 17).

    Args:
        node: The node.
        bins: Number of mel bands.
        length: Length of the DFT.
        rate: Sampling rate in Hz.
        lower: Lower edge of the lowest band in Hz.
        upper: Upper edge of the highest band in Hz.
    """
    for name, operand in (("num_mel_bins", bins), ("dft_length", length), ("sample_rate", rate)):
        require_single(name, operand, "int64", "int32")
        for count in int_list(node, name, operand) or ():
            require(count >= 1, "{} is {}", name, count)
    for name, operand in (("lower_edge_hertz", lower), ("upper_edge_hertz", upper)):
        require_single(name, operand)
        if operand.known is not None and operand.known.size:
            edge = operand.known.reshape(-1)[0]
            require(edge >= 0, "{} is {}; a frequency is not negative", name, edge)


def stft(
    node: Node, types: Sequence[ValueType | None], values: Sequence[Array | None]
) -> list[ValueType | None]:
    """Return the type ``[batch, frames, frequencies, 2]``.

    Args:
        node: The STFT node.
        types: Types of signal, step, window and length, None while unknown.
        values: Contents of constant inputs: step and length may be among them.
    """
    signal = types[0]
    if not isinstance(signal, TensorType):
        return [None]
    shape = signal.shape or (None, None)
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
        if isinstance(shape[1], int) and hop is not None:
            frames = max(0, 1 + (shape[1] - size) // hop)
    return [TensorType(signal.dtype, (shape[0], frames, results, 2))]


def warping_operands(node: Node, costs: Tensor) -> None:
    """Raise ShapeError unless the input is one matrix of costs."""
    require_rank("input", costs, 2, 3)
    require(costs.rank == 2 or costs.shape[0] == 1, "{} matrices of costs", costs.shape[0])


def warping_path(
    node: Node, types: Sequence[ValueType | None], values: Sequence[Array | None]
) -> list[ValueType | None]:
    """Return the type ``[2, steps]``; the number of steps depends on the costs."""
    return [TensorType("int32", (2, None))]


declare_contributed(
    "DynamicTimeWarping",
    "input -> output",
    attributes={},
    requires=warping_operands,
    infer=warping_path,
    compute=reference.time_warping,
)
# The operators of this family, each in all its versions.
declare(
    "BlackmanWindow",
    "HammingWindow",
    "HannWindow",
    requires=window_operands,
    by_body=True,
    grows=True,
)
declare("DFT", requires=dft_operands, grows=True)
declare("MelWeightMatrix", requires=mel_operands, grows=True)
declare(
    "STFT", requires=stft_operands, infer=stft, compute=reference.stft, grows=True, batch=along(0)
)

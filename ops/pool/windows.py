"""Windows of pooling and convolutions: their attributes, whether they fit, and their number."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import attrs

from subgraph.errors import ShapeError
from subgraph.graph.graph import Node
from subgraph.graph.types import Dim, Shape, TensorType, ValueType
from subgraph.operators.requirements import (
    Tensor,
    checked_numbers,
    decoded,
    require,
    require_shape,
    require_whole_number,
)
from subgraph.ops.elementwise.op import Types, Values, tensor

# Greatest stride, dilation, number of taps and pad, so that positions fit in 64 bits.
MAX_EXTENT = 2**31 - 1
INT8 = ("int8", "uint8")
_AUTO_PADS = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")


@attrs.frozen
class Windows:
    """The attributes of windows, checked against their ranges.

    Attributes:
        strides: Elements from a window to the next one along each dimension.
        dilations: Elements from a tap to the next one.
        pads: Padding before and after each dimension; 0 with ``auto_pad``.
        auto: The attribute ``auto_pad``.
    """

    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    auto: str


def windows_of(node: Node, count: int) -> Windows:
    """Return the attributes of windows over ``count`` dimensions.

    Raises:
        ShapeError: An attribute is out of its range, or has another number of values.
    """
    held = node.attrs
    strides, dilations, pads = held.get("strides"), held.get("dilations"), held.get("pads")
    return _windows(
        count,
        decoded(held.get("auto_pad", "NOTSET")),
        tuple(strides) if strides else None,
        tuple(dilations) if dilations else None,
        tuple(pads) if pads else None,
    )


@lru_cache(1024)
def _windows(
    count: int,
    auto: str,
    strides: tuple[int, ...] | None,
    dilations: tuple[int, ...] | None,
    pads: tuple[int, ...] | None,
) -> Windows:
    """Return the checked attributes; cached, since each plan asks for them several times."""
    require(auto in _AUTO_PADS, "auto_pad is {!r}; it must be one of {}", auto, _AUTO_PADS)
    around = checked_numbers("pads", pads, 2 * count, 0, 0, MAX_EXTENT)
    if auto != "NOTSET":
        around = [0] * 2 * count
    return Windows(
        tuple(checked_numbers("strides", strides, count, 1, 1, MAX_EXTENT)),
        tuple(checked_numbers("dilations", dilations, count, 1, 1, MAX_EXTENT)),
        tuple(zip(around[:count], around[count:], strict=True)),
        auto,
    )


def require_windows(node: Node, sizes: Sequence[int], kernel: Sequence[int]) -> None:
    """Require that at least one window fits into an image, with ``ceil_mode`` its beginning.

    Args:
        node: A convolution or pooling, with the attributes of windows.
        sizes: Spatial sizes of the image.
        kernel: Taps of a window along each dimension.

    Raises:
        ShapeError: An attribute is out of its range, or no window fits.
    """
    windows = windows_of(node, len(sizes))
    ceil = bool(node.attrs.get("ceil_mode", 0))
    free = windows.auto.startswith("SAME")
    rows = zip(sizes, kernel, windows.strides, windows.dilations, windows.pads, strict=True)
    for size, taps, stride, dilation, pads in rows:
        reach = (taps - 1) * dilation + 1
        fits = free or _fitting(size, reach, stride, *pads, ceil) > 0
        if not (fits and taps >= 1 and reach <= MAX_EXTENT):
            raise ShapeError(
                f"a window of {taps} taps, {dilation} apart, does not fit into {size} elements "
                f"with pads {pads[0]}, {pads[1]}"
            )


def require_image(x: Tensor) -> None:
    """Require a batch, channels and at least one dimension of pixels."""
    require(x.rank >= 3, "the input is {}; it needs rank 3 or more", x)


def require_filters(node: Node, x: Tensor, w: Tensor, bias: Tensor | None) -> None:
    """Require that filters fit an image, and the bias the filters.

    Args:
        node: A convolution, with ``group`` and the attributes of windows.
        x: Input, ``[N, C, *spatial]``.
        w: Filters, ``[M, C / group, *kernel]``.
        bias: ``[M]``, or None.

    Raises:
        ShapeError: They do not fit.
    """
    require_image(x)
    require(w.rank == x.rank, "the filters {} and the input {} differ in rank", w, x)
    group = require_whole_number(node, "group", 1, least=1)
    outputs, taken, channels = w.shape[0], w.shape[1], x.shape[1]
    if not channels == taken * group:
        raise ShapeError(f"{channels} channels; the filters take {taken} in each of {group} groups")
    if not outputs % group == 0:
        raise ShapeError(f"{outputs} filters do not divide into {group} groups")
    require_shape("B", bias, w.shape[:1], "one for each filter")
    require_kernel_shape(node, w.shape[2:])
    require_windows(node, x.shape[2:], w.shape[2:])


def require_kernel_shape(node: Node, sizes: tuple[int, ...]) -> None:
    """Require that ``kernel_shape``, if the node has it, is the size of the filters."""
    stated = node.attrs.get("kernel_shape")
    if stated and tuple(stated) != sizes:
        raise ShapeError(f"kernel_shape is {list(stated)}, the filters have {list(sizes)}")


def window_counts(node: Node, shape: Shape, kernel: Sequence[Dim]) -> list[Dim]:
    """Return the number of windows along each spatial dimension; None where it is unknown.

    Args:
        node: A convolution or pooling, with the attributes of windows.
        shape: Shape of the input, ``[N, C, *spatial]``.
        kernel: Taps of a window along each spatial dimension.
    """
    count = len(shape) - 2
    windows = windows_of(node, count)
    ceil = bool(node.attrs.get("ceil_mode", 0))
    found: list[Dim] = []
    same_size = windows.auto.startswith("SAME")
    for k, (size, taps) in enumerate(zip(shape[2:], kernel, strict=True)):
        stride = windows.strides[k]
        if same_size:
            same = size if stride == 1 else None
            found.append(-(-size // stride) if isinstance(size, int) else same)
        elif not isinstance(taps, int):
            found.append(None)
        else:
            reach = (taps - 1) * windows.dilations[k] + 1
            if isinstance(size, int):
                found.append(_fitting(size, reach, stride, *windows.pads[k], ceil))
            else:
                same = stride == 1 and sum(windows.pads[k]) == reach - 1
                found.append(size if same else None)
    return found


def _fitting(size: int, reach: int, stride: int, before: int, after: int, ceil: bool) -> int:
    """Return the number of windows of ``reach`` elements that fit, less than 1 if none does.

    With ``ceil`` the last one may end behind the pads, even if it is the only one.
    """
    room = size + before + after - reach
    count = -(-room // stride) if ceil else room // stride
    # A last window that begins in the pads after the input is dropped.
    if not ceil or count * stride < size + before:
        count += 1
    return count


def convolution(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Infer ``[N, M, *spatial]`` of Conv: a channel for each filter, a pixel for each window.

    Args:
        node: The node, with the attributes of windows.
        types: Types of the inputs; None where unknown.
        values: Known contents of the inputs (unused).
    """
    x = tensor(types[0])
    return [None if x is None else filtered_type(node, x.dtype, types[0], types[1])]


def filtered_type(
    node: Node, dtype: str, image: ValueType | None, filters: ValueType | None
) -> TensorType:
    """Return the type of a convolution: ``[N, M, *spatial]``, of unknown shape if an operand's is.

    Args:
        node: The node, with the attributes of windows.
        dtype: Dtype of the result.
        image: Type of the input, ``[N, C, *spatial]``; None where unknown.
        filters: Type of the filters, ``[M, C / group, *kernel]``; None where unknown.

    """
    x, w = tensor(image), tensor(filters)
    if x is None or x.shape is None or w is None or w.shape is None:
        return TensorType(dtype)
    return TensorType(dtype, (x.shape[0], w.shape[0], *window_counts(node, x.shape, w.shape[2:])))

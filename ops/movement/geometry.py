"""Sizes of convolutions and pooling in three spatial dimensions, and packing of their weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np

from subgraph.engine.planner.lowering import Unsupported
from subgraph.engine.planner.operands import Operand
from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.operators.requirements import decoded
from subgraph.ops.shared.tile_planning import Tiles, halved, round_up

from .packing import narrowed, pack_blocks, pack_matrices, pack_winograd, pack_winograd_strided
from .window_arguments import WindowArguments

Triple = tuple[int, int, int]
# Pixels: strides up to here are kept even along axes with a single window (estimate). Larger ones
# become 1 there, since the scratch memory of kernels grows with the stride.
_MAX_LONE_STRIDE = 64
# Taps of an axis that are tried one by one (estimate); of more, those that read pixels are
# computed, since a small file can declare 2**31.
_MAX_TRIED_TAPS = 4096


@attrs.frozen
class Geometry:
    """Sizes of a convolution or pooling; spatial ones as (D, H, W), in pixels.

    Attributes:
        images: Batch size.
        groups: Number of groups of channels.
        inputs: Input channels of one group.
        outputs: Output channels of one group.
        source: Spatial sizes of the input.
        target: Spatial sizes of the output.
        kernel: Taps of a window along each axis.
        strides: Input pixels from a window to the next one.
        dilations: Input pixels from a tap to the next one.
        pads: Padding before the image.
    """

    images: int
    groups: int
    inputs: int
    outputs: int
    source: Triple
    target: Triple
    kernel: Triple
    strides: Triple
    dilations: Triple
    pads: Triple

    @property
    def taps(self) -> int:
        """Taps of a window: weights for one input and one output channel."""
        return math.prod(self.kernel)

    @property
    def pixels(self) -> int:
        """Output pixels of one image."""
        return math.prod(self.target)

    @property
    def flops(self) -> int:
        """Floating-point operations of a direct convolution."""
        weights = self.groups * self.inputs * self.outputs * self.taps
        return 2 * self.images * weights * self.pixels

    @property
    def padded(self) -> bool:
        """Whether some window reaches outside the input."""
        return any(
            p > 0 or (o - 1) * s - p + (k - 1) * d >= n
            for p, o, s, k, d, n in zip(
                self.pads,
                self.target,
                self.strides,
                self.kernel,
                self.dilations,
                self.source,
                strict=True,
            )
        )

    @property
    def reads_each_pixel(self) -> bool:
        """Whether every output reads one input pixel, its own."""
        # With a stride some window of as many outputs as inputs reaches outside.
        return self.taps == 1 and self.source == self.target and not self.padded

    def reach(self, axis: int, outputs: int) -> int:
        """Return the input pixels along ``axis`` that the windows of ``outputs`` outputs span."""
        windows = (outputs - 1) * self.strides[axis]
        return windows + (self.kernel[axis] - 1) * self.dilations[axis] + 1

    def outputs_within(self, axis: int, most: int, each: int, multiple: int = 1) -> int:
        """Return the outputs along an axis, halved until they read at most ``most`` bytes.

        Args:
            axis: The axis.
            most: Bytes that may be read.
            each: Bytes of the input for each of its pixels along the axis.
            multiple: Halves are rounded up to multiples of it, which is also the least result.
        """
        step = self.strides[axis]
        rest = self.reach(axis, 1) - step
        return halved(self.target[axis], multiple, multiple, each, step, rest, most)

    def flat(self) -> Geometry:
        """Merge the pixels of a 1x1 convolution that reads each input pixel once, in order."""
        # The pixels of such a convolution are independent, so the kernel may see them as one line.
        if not self.reads_each_pixel:
            return self
        line = (1, 1, self.pixels)
        return attrs.evolve(self, source=line, target=line)

    def folded(self) -> Geometry:
        """Merge neighbouring axes along which each input pixel is read once, in order."""
        line = self.flat()
        if line is not self:
            return line
        if all(
            self.kernel[axis] == self.strides[axis] == 1
            and self.pads[axis] == 0
            and self.source[axis] == self.target[axis]
            for axis in (1, 2)
        ):
            # The first axis takes the place of the second: (D, H, W) as (1, D, H * W).
            depth, rows, columns = self.source
            return attrs.evolve(
                self,
                source=(1, depth, rows * columns),
                target=(1, self.target[0], rows * columns),
                kernel=(1, self.kernel[0], 1),
                strides=(1, self.strides[0], 1),
                dilations=(1, self.dilations[0], 1),
                pads=(0, self.pads[0], 0),
            )
        return self

    def trimmed(self) -> tuple[Geometry, tuple[slice, slice, slice]]:
        """Drop the first and last taps of each axis if they read nothing but padding.

        Returns:
            The new sizes, and the taps that remain along each axis.
        """
        cuts = [self._taps_inside(axis) for axis in range(3)]
        each = list(zip(cuts, self.pads, self.dilations, strict=True))
        g = attrs.evolve(
            self,
            kernel=triple([cut.stop - cut.start for cut in cuts], 1),
            dilations=triple([d if c.stop - c.start > 1 else 1 for c, _, d in each], 1),
            pads=triple([pad - cut.start * d for cut, pad, d in each], 0),
        )
        return g, (cuts[0], cuts[1], cuts[2])

    def _taps_inside(self, axis: int) -> slice:
        """Return the taps of an axis from the first to the last that reads a pixel."""
        step, pad, dilation = self.strides[axis], self.pads[axis], self.dilations[axis]

        def reads(tap: int) -> bool:
            # The first output whose tap lies at or behind the first pixel; if its tap lies behind
            # the last one, no output of this tap reads a pixel.
            output = max(0, -(-(pad - tap * dilation) // step))
            at = output * step - pad + tap * dilation
            return output < self.target[axis] and at < self.source[axis]

        kernel = self.kernel[axis]
        if kernel > _MAX_TRIED_TAPS:
            # Before these even the last output reads the pad in front, after them the first reads
            # the pad behind; between them each is read unless an output steps over the input.
            first = max(0, -(-(pad - (self.target[axis] - 1) * step) // dilation))
            last = min(kernel - 1, (self.source[axis] - 1 + pad) // dilation)
            if step > self.source[axis]:
                raise Unsupported(f"windows of {kernel} taps, {step} apart")
            return slice(first, last + 1) if first <= last else slice(0, kernel)
        taps = [tap for tap in range(kernel) if reads(tap)]
        # A window that reads nothing but padding keeps its taps, as a kernel needs at least one.
        return slice(taps[0], taps[-1] + 1) if taps else slice(0, kernel)

    def arguments(self) -> dict[str, int]:
        """Return the fields of `WindowArguments`, with which kernels of windows are called."""
        sizes = (self.source, self.target, self.kernel, self.strides, self.dilations, self.pads)
        values = [value for triple in sizes for value in triple]
        return dict(zip(WindowArguments.fields, values, strict=True))


def ints(node: Node, name: str, rank: int, default: int) -> list[int]:
    """Return an attribute that has one integer for each spatial dimension.

    Args:
        node: The node.
        name: The attribute's name.
        rank: Number of values if it is missing or empty.
        default: Each of these values.
    """
    found: Any = node.attrs.get(name)
    return [int(v) for v in found] if found else [default] * rank


def triple(values: Sequence[int], fill: int) -> Triple:
    """Return one to three numbers as three, with ``fill`` before them.

    Raises:
        Unsupported: There are more than three.
    """
    if not 1 <= len(values) <= 3:
        raise Unsupported(f"{len(values)} spatial dimensions; 1 to 3 have kernels")
    full = [*[fill] * (3 - len(values)), *values]
    return full[0], full[1], full[2]


def auto_pad(node: Node) -> str:
    """Return the attribute ``auto_pad`` as text."""
    return decoded(node.attrs.get("auto_pad", "NOTSET"))


def pads_before(
    node: Node, source: Sequence[int], target: Sequence[int], kernel: Sequence[int]
) -> list[int]:
    """Return the pads before each spatial dimension of a Conv or a pooling.

    Args:
        node: The node, with ``pads`` or ``auto_pad``.
        source: Spatial sizes of the input.
        target: Spatial sizes of the output.
        kernel: Taps along each dimension.
    """
    rank = len(source)
    mode = auto_pad(node)
    if mode == "NOTSET":
        return ints(node, "pads", 2 * rank, 0)[:rank]
    if mode == "VALID":
        return [0] * rank
    strides, dilations = ints(node, "strides", rank, 1), ints(node, "dilations", rank, 1)
    before: list[int] = []
    for n, o, k, s, d in zip(source, target, kernel, strides, dilations, strict=True):
        # ONNX puts an odd pixel of padding behind the image for SAME_UPPER and before it for
        # SAME_LOWER.
        total = max((o - 1) * s + (k - 1) * d + 1 - n, 0)
        before.append(total // 2 if mode == "SAME_UPPER" else total - total // 2)
    return before


def conv_geometry(node: Node, x: Operand, w: Operand, y: Operand) -> Geometry:
    """Return the sizes of a Conv node.

    Args:
        node: The node.
        x: Input, ``[N, C, *spatial]``.
        w: Weights, ``[M, C / group, *kernel]``.
        y: Output, ``[N, M, *spatial]``.

    Raises:
        Unsupported: It has more than three spatial dimensions.
    """
    groups = int(node.attrs.get("group", 1))
    return window_geometry(node, x, y, w.shape[2:], (groups, w.shape[1], w.shape[0] // groups))


def window_geometry(
    node: Node, x: Operand, y: Operand, kernel: Sequence[int], channels: Triple
) -> Geometry:
    """Return the sizes of a node with windows over images.

    Args:
        node: A convolution or pooling, with the attributes of windows.
        x: Input, ``[N, C, *spatial]``.
        y: Output, ``[N, M, *spatial]``.
        kernel: Taps along each spatial dimension.
        channels: Groups, input channels of a group, output channels of a group.

    Raises:
        Unsupported: It has more than three spatial dimensions.
    """
    rank = x.rank - 2
    before = pads_before(node, x.shape[2:], y.shape[2:], kernel)
    return Geometry(
        x.shape[0],
        *channels,
        triple(x.shape[2:], 1),
        triple(y.shape[2:], 1),
        triple(kernel, 1),
        triple(steps(ints(node, "strides", rank, 1), y.shape[2:]), 1),
        # The dilation of a single tap has no effect.
        triple(steps(ints(node, "dilations", rank, 1), kernel, 1), 1),
        triple(before, 0),
    )


def steps(values: Sequence[int], counts: Sequence[int], most: int = _MAX_LONE_STRIDE) -> list[int]:
    """Return strides or dilations, replaced by 1 along axes where they have no effect.

    Args:
        values: The strides (or dilations) of the axes.
        counts: The windows (or taps) along each axis; with a single one there is no step.
        most: Strides up to here are not replaced.
    """
    pairs = zip(values, counts, strict=True)
    return [step if step <= most or count > 1 else 1 for step, count in pairs]


def merged(g: Geometry, lanes: int) -> int:
    """Return how many groups must be merged so that they are whole blocks of channels.

    The last merged group may have fewer groups if padding completes its block of channels.
    """
    if g.groups == 1:
        return 1
    # A block of channels must not belong to two merged groups, on the input or the output side.
    together = math.lcm(lanes // math.gcd(lanes, g.inputs), lanes // math.gcd(lanes, g.outputs))
    filled = round_up(g.groups, together)
    ends = (filled * n == round_up(g.groups * n, lanes) for n in (g.inputs, g.outputs))
    return together if all(ends) else g.groups


def merge(g: Geometry, together: int) -> Geometry:
    """Return the sizes with every ``together`` groups merged to one."""
    return attrs.evolve(
        g,
        groups=-(-g.groups // together),
        inputs=together * g.inputs,
        outputs=together * g.outputs,
    )


def dense_groups(weight: Array, groups: int, together: int) -> Array:
    """Return the weights of merged groups, with zeros between channels of different groups.

    Args:
        weight: ``[O, I / groups, ...]``.
        groups: Number of groups.
        together: Groups merged to one; groups of zeros complete the last one.

    Returns:
        ``[outputs of all merged groups, inputs of one merged group, ...]``.
    """
    if together == 1:
        return weight
    outputs, inputs = weight.shape[0] // groups, weight.shape[1]
    filled = round_up(groups, together)
    split = np.zeros((filled, outputs, *weight.shape[1:]), weight.dtype)
    split[:groups] = weight.reshape(groups, outputs, *weight.shape[1:])
    split = split.reshape(-1, together, *split.shape[1:])
    shape = (len(split), together, outputs, together, inputs, *weight.shape[2:])
    dense = np.zeros(shape, weight.dtype)
    for i in range(together):
        # Zeros elsewhere keep the channels of different groups apart in one dense product.
        dense[:, i, :, i] = split[:, i]
    return dense.reshape(filled * outputs, together * inputs, *weight.shape[2:])


def direct_weights(g: Geometry, of: Tiles, together: int, plain: bool) -> Callable[[Array], Array]:
    """Return the function that packs weights for the kernel ``direct``.

    Args:
        g: Sizes of the convolution, its groups not yet merged.
        of: The contraction tiles.
        together: Groups that are merged to one (`merged`).
        plain: The kernel reads a plain input: rows of panels are (channel, tap).

    Returns:
        A function from ``[O, I / groups, *kernel]`` to the panels of each merged group, flat.
    """
    groups = merge(g, together).groups

    def make(weight: Array) -> Array:
        whole = dense_groups(weight, g.groups, together)
        outputs, inputs = whole.shape[0] // groups, whole.shape[1]
        if plain:
            stack = whole.reshape(groups, outputs, -1).swapaxes(1, 2)
            panels = pack_matrices(stack, of)
        else:
            panels = pack_blocks(whole.reshape(groups, outputs, inputs, -1), of)
        return narrowed(panels, of, groups, outputs)

    return make


def bands(g: Geometry, of: Tiles) -> list[tuple[int, int]]:
    """Return for each panel of output channels the first input block it reads, and their number."""
    channels = g.groups * g.outputs
    found: list[tuple[int, int]] = []
    for start in range(0, channels, of.width):
        end = min(channels, start + of.width)
        first = start // g.outputs * g.inputs // of.lanes
        last = -(-((end - 1) // g.outputs + 1) * g.inputs // of.lanes)
        found.append((first, last - first))
    return found


def band_table(g: Geometry, of: Tiles) -> Array:
    """Return the bands, ``[panels, 3]`` int64: first block, blocks, offset of weights in bytes."""
    at = 0
    rows: list[tuple[int, int, int]] = []
    left = round_up(g.groups * g.outputs, of.lanes)
    for first, count in bands(g, of):
        rows.append((first, count, at))
        at += count * of.lanes * g.taps * min(of.width, left) * of.item
        left -= of.width
    return np.array(rows, np.int64)


def band_weights(g: Geometry, of: Tiles) -> Callable[[Array], Array]:
    """Return the function that packs the weights of a grouped convolution that runs in bands."""

    def make(weight: Array) -> Array:
        flat = weight.reshape(g.groups, g.outputs, g.inputs, -1)
        packed: list[Array] = []
        for panel, (first, count) in enumerate(bands(g, of)):
            start = panel * of.width
            end = min(g.groups * g.outputs, start + of.width)
            dense = np.zeros((end - start, count * of.lanes, g.taps), of.dtype)
            for group in range(start // g.outputs, (end - 1) // g.outputs + 1):
                rows = slice(max(start, group * g.outputs), min(end, (group + 1) * g.outputs))
                at = group * g.inputs - first * of.lanes
                inside = slice(rows.start - group * g.outputs, rows.stop - group * g.outputs)
                target = dense[rows.start - start : rows.stop - start]
                target[:, at : at + g.inputs] = flat[group, inside]
            packed.append(pack_blocks(dense[None], of))
        return np.concatenate(packed)

    return make


def blocked_vector(of: Tiles) -> Callable[[Array], Array]:
    """Return the function that pads a bias with zeros to whole blocks."""

    def make(bias: Array) -> Array:
        padded = np.zeros(round_up(bias.size, of.lanes), of.dtype)
        padded[: bias.size] = bias.reshape(-1)
        return padded

    return make


def depthwise_weights(of: Tiles) -> Callable[[Array], Array]:
    """Return the function that packs weights to ``[C / lanes][rows][group][columns][lanes]``.

    The kernels of ``subgraph.ops.conv.depthwise_kernels`` read that form.
    """

    def make(weight: Array) -> Array:
        channels, group, columns = weight.shape[0], weight.shape[1], weight.shape[-1]
        padded = np.zeros((round_up(channels, of.lanes), *weight.shape[1:]), of.dtype)
        padded[:channels] = weight
        split = padded.reshape(-1, of.lanes, group, math.prod(weight.shape[2:-1]), columns)
        return np.ascontiguousarray(split.transpose(0, 3, 2, 4, 1))

    return make


def lane_sum_weights(of: Tiles, g: Geometry) -> Callable[[Array], Array]:
    """Return the function that packs weights as `LaneSumArguments` describes them."""

    def make(weight: Array) -> Array:
        outputs, inputs = weight.shape[:2]
        padded = np.zeros((outputs, round_up(inputs, of.lanes), *g.kernel), of.dtype)
        padded[:, :inputs] = weight.reshape(outputs, inputs, *g.kernel)
        split = padded.reshape(outputs, -1, of.lanes, *g.kernel)
        return np.ascontiguousarray(split.transpose(0, 3, 1, 4, 5, 2))

    return make


def first_lane(of: Tiles) -> Callable[[Array], Array]:
    """Return the function that puts each number of a bias in the first lane of a vector."""

    def make(bias: Array) -> Array:
        vectors = np.zeros((bias.size, of.lanes), of.dtype)
        vectors[:, 0] = bias.reshape(-1)
        return vectors

    return make


def winograd_weights(of: Tiles, m: int) -> Callable[[Array], Array]:
    """Return the function that packs weights for the kernel ``winograd`` with stride 1."""
    return lambda weight: pack_winograd(_slices(weight, of), of, m)


def strided_winograd_weights(of: Tiles) -> Callable[[Array], Array]:
    """Return the function that packs weights for the kernel ``winograd`` with stride 2."""
    return lambda weight: pack_winograd_strided(_slices(weight, of), of)


def _slices(weight: Array, of: Tiles) -> Array:
    """Return ``[O, I, (D,) H, W]`` as ``[O, D * I padded to whole blocks, H, W]``."""
    outputs, inputs, *_, rows, columns = weight.shape
    deep = weight.reshape(outputs, inputs, -1, rows, columns)
    if deep.shape[2] == 1:
        return deep[:, :, 0]
    whole = np.zeros(
        (outputs, deep.shape[2], round_up(inputs, of.lanes), rows, columns), weight.dtype
    )
    whole[:, :, :inputs] = deep.swapaxes(1, 2)
    return whole.reshape(outputs, -1, rows, columns)

"""Tiles of the direct convolution: their arguments, and the calls that compute a row of outputs.

In these functions ``a`` is the view of the kernel's arguments and ``t`` that of the block of the
tile's arguments, which they set field by field.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import attrs
from numba.extending import register_jitable

from subgraph.dtypes import item_bytes
from subgraph.engine.codegen.simd import call_kernel, ld_i64
from subgraph.engine.codegen.tile import rows_of
from subgraph.engine.codegen.tiling import TileBlock

from .arguments import DirectArguments
from .copy_kernels import taps_inside

_NEAR = 8  # tiles whose sums fit in the L1 cache until their activation (estimate)


@attrs.frozen
class DirectForm:
    """The variant of a kernel of `direct`: arguments of the factory, and what follows from them.

    Attributes:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Channels of one block.
        mr: Most pixels of a tile.
        nv: Blocks of output channels of a panel.
        plain: The input is plain, ``[N][C][D][H][W]``; the output is blocked in any case.
        weights: ``"bfloat16"`` if the weights are stored as bfloat16, "" if as ``dtype``.
    """

    dtype: str
    lanes: int
    mr: int
    nv: int
    plain: bool
    weights: str

    @property
    def item(self) -> int:
        """Bytes of an element of the input and of the output."""
        return item_bytes(self.dtype)

    @property
    def weight_vector(self) -> int:
        """Bytes of the weights of one input channel for a block of output channels."""
        return self.lanes * (2 if self.weights == "bfloat16" else self.item)

    @property
    def block(self) -> int:
        """Bytes of an output pixel: of the channels of a block."""
        return self.lanes * self.item

    @property
    def pixel(self) -> int:
        """Bytes of an input pixel: of the channels of a block, or of one channel if plain."""
        return self.item if self.plain else self.block

    @property
    def step(self) -> int:
        """Channels of an input block, 1 if plain."""
        return 1 if self.plain else self.lanes


class Run(NamedTuple):
    """The numbers that all rows of a panel share in a segment of the input blocks.

    Attributes:
        pixels: Outputs of a row.
        vectors: Blocks of output channels.
        steps: Steps of the sums.
        continued: The sums continue the partial sums in y.
        activation: Address of the kernel of the activation; 0: none.
        strip: Address of the strip that computes a row; 0: tiles do.
    """

    pixels: int
    vectors: int
    steps: int
    continued: bool
    activation: int
    strip: int


@register_jitable
def is_partial(a: DirectArguments, begin: int) -> bool:
    """Return whether the segment from block ``begin`` on is a partial last block alone."""
    taps = a.kernel_depth * a.kernel_height * a.kernel_width
    return taps > 1 and a.rest != 0 and begin + 1 == a.input_blocks


@register_jitable
def strip_of(a: DirectArguments, partial: bool) -> int:
    """Return the strip that runs the rows of a segment (0: none)."""
    return 0 if partial and a.gathered == 0 else a.strip


def stride_setter(form: DirectForm) -> Any:
    """Return ``f(a, t)``, which sets the fields of ``t`` that are the same for all tiles."""
    block, weight_vector = form.block, form.weight_vector

    @register_jitable
    def set_strides(a: DirectArguments, t: TileBlock) -> None:
        along, between = a.y_column * block, a.y_block * block
        t.b_vector = weight_vector
        t.c_row = along
        t.c_vector = between
        t.start_vector = block
        t.residual_row = along
        t.residual_vector = between
        t.low = a.low
        t.high = a.high

    return set_strides


def loop_setter(form: DirectForm) -> Any:
    """Return ``f(a, t, row, plane, block, partial)``, which sets the loops over K of a segment.

    ``row``, ``plane`` and ``block`` are the bytes between the rows, planes (gathered taps) and
    input blocks that tiles read; ``partial`` is that of `is_partial`. `panel_setter` sets the
    counts that depend on the panel.
    """
    item, pixel, step, plain = form.item, form.pixel, form.step, form.plain

    @register_jitable
    def set_loops(
        a: DirectArguments, t: TileBlock, row: int, plane: int, block: int, partial: bool
    ) -> None:
        kd, kh, kw = a.kernel_depth, a.kernel_height, a.kernel_width
        t.a_row = a.stride_width * pixel
        t.outer_a = block
        if a.gathered != 0:
            t.a_row = pixel
            t.middle_count = 1
            t.inner_count = kd * kh * kw
            t.inner_a = plane
            t.steps = step
            t.a_step = item
        # The taps of a kernel row are equally far apart, so that one run of steps covers them.
        elif plain or (a.dilation_width == 1 and not partial):
            t.middle_count = kd
            t.middle_a = a.dilation_depth * plane
            t.inner_count = kh
            t.inner_a = a.dilation_height * row
            t.steps = kw * step
            t.a_step = a.dilation_width * item
        else:
            t.middle_count = kh
            t.middle_a = a.dilation_height * row
            t.inner_count = kw
            t.inner_a = a.dilation_width * pixel
            t.steps = step
            t.a_step = item
        # With a single tap the innermost loop runs over input blocks (`_set_loop_counts`).
        if kd * kh * kw == 1:
            t.inner_a = block

    return set_loops


@register_jitable
def skip_planes(a: DirectArguments, t: TileBlock, above: int) -> int:
    """Skip the kernel planes that read nothing but padding; return how many come first.

    Args:
        a: The kernel's arguments.
        t: The tile's arguments, whose weights and loop over planes are set.
        above: Plane of the input that the first kernel plane reads.
    """
    first, count = taps_inside(above, above, a.kernel_depth, a.dilation_depth, a.image_depth)
    t.middle_count = count
    t.b = t.b + first * t.middle_b
    return first


def border_skipper(plain: bool) -> Any:
    """Return ``f(a, t, above, weights, partial)``, which skips kernel rows outside the image."""

    @register_jitable
    def skip_border(
        a: DirectArguments, t: TileBlock, above: int, weights: int, partial: bool
    ) -> int:
        """Skip the kernel rows that read nothing but padding; return how many come first.

        ``above`` is the row of the image that the first kernel row reads.
        """
        first, count = taps_inside(above, above, a.kernel_height, a.dilation_height, a.image_height)
        if plain or (a.dilation_width == 1 and not partial):
            t.inner_count = count
            t.b = weights + first * t.inner_b
        else:
            t.middle_count = count
            t.b = weights + first * t.middle_b
        return first

    return skip_border


@register_jitable
def _skip_columns(a: DirectArguments, t: TileBlock, left: int, pixels: int, weights: int) -> None:
    """Skip the kernel columns that read nothing but padding, for a tile of ``pixels`` outputs.

    ``left`` is the column of the image that the first tap of the first output reads.
    """
    right = left + (pixels - 1) * a.stride_width
    first, count = taps_inside(left, right, a.kernel_width, a.dilation_width, a.image_width)
    t.inner_count = count
    t.a = t.a + first * t.inner_a
    t.b = weights + first * t.inner_b


def weights_locator(form: DirectForm) -> Any:
    """Return ``f(a, group, panel, begin)``, which returns the address of a panel's weights."""
    nv, row = form.nv, form.step * form.weight_vector

    @register_jitable
    def weights_at(a: DirectArguments, group: int, panel: int, begin: int) -> int:
        """Return the address of a panel's weights from input block ``begin``."""
        blocks, first = a.output_blocks, panel * nv
        taps = a.kernel_depth * a.kernel_height * a.kernel_width
        before = (group * blocks + first) * a.input_blocks + begin * min(nv, blocks - first)
        weights: int = a.weights
        return weights + before * taps * row

    return weights_at


def panel_setter(form: DirectForm, weights_at: Any) -> Any:
    """Return ``f(a, t, group, panel, begin, end)``, which sets the fields of ``t`` for a panel.

    Args:
        form: The kernel's variant.
        weights_at: The function of `weights_locator`.
    """
    nv, block, step, weight_vector = form.nv, form.block, form.step, form.weight_vector
    set_weight_strides = _weight_stride_setter(form)

    @register_jitable
    def set_panel(
        a: DirectArguments, t: TileBlock, group: int, panel: int, begin: int, end: int
    ) -> int:
        """Set weights and start values of a panel from input block begin to end; return vectors."""
        taps = a.kernel_depth * a.kernel_height * a.kernel_width
        first = panel * nv
        vectors = min(nv, a.output_blocks - first)
        columns = vectors * weight_vector
        if a.bands != 0:
            band = a.bands + 24 * panel
            t.outer_count = ld_i64(band + 8)
            t.b = a.weights + ld_i64(band + 16)
            end = ld_i64(band) + ld_i64(band + 8)
        else:
            t.outer_count = end - begin
            t.b = weights_at(a, group, panel, begin)
        partial = is_partial(a, begin)
        t.last_steps = a.rest if end == a.input_blocks else 0
        _set_loop_counts(a, t, taps, partial)
        t.ahead = t.b + a.input_blocks * taps * step * columns
        set_weight_strides(a, t, taps, columns, partial)
        bias = a.bias
        if bias != 0:
            bias += (group * a.output_blocks + first) * block
        t.start = bias
        # The first segment starts from the bias, which all pixels share; others continue sums in y.
        t.start_row = 0 if begin == 0 else t.c_row
        t.start_vector = block if begin == 0 else t.c_vector
        return vectors

    return set_panel


@register_jitable
def _set_loop_counts(a: DirectArguments, t: TileBlock, taps: int, partial: bool) -> None:
    """Change the counts of the loops over input blocks and taps to what the tile or strip needs.

    ``t.outer_count`` is the number of input blocks, ``t.last_steps`` the channels of the last one
    (0: all), ``taps`` the product of the kernel's sizes, ``partial`` that of `is_partial`.
    """
    if partial and strip_of(a, partial) != 0:
        # A strip ends its rounds with a partial one: here each tap is a partial round.
        t.outer_count = taps
        t.inner_count = 0
        t.outer_a = t.inner_a
    elif partial:
        t.outer_count = 1
    elif a.strip != 0 and t.last_steps != 0:
        t.inner_count = t.outer_count - 1
        t.outer_count = 1
    elif (taps == 1 or a.gathered != 0) and t.last_steps == 0:
        # The innermost loop over segments has the least overhead.
        t.inner_count = t.outer_count * taps
        t.outer_count = 1
    elif taps == 1:
        t.inner_count = 1


def _weight_stride_setter(form: DirectForm) -> Any:
    """Return ``f(a, t, taps, columns, partial)``, which sets the strides of a panel's weights.

    ``columns`` is the bytes of the panel's weights of one step; ``taps`` and ``partial`` are those
    of `_set_loop_counts`.
    """
    plain, step = form.plain, form.step

    @register_jitable
    def set_weight_strides(
        a: DirectArguments, t: TileBlock, taps: int, columns: int, partial: bool
    ) -> None:
        t.b_step = columns
        t.inner_b = t.steps * columns
        rows = plain or (a.dilation_width == 1 and not partial)
        t.middle_b = (a.kernel_height if rows else a.kernel_width) * t.steps * columns
        t.outer_b = (1 if partial else taps) * step * columns
        if a.strip != 0 and a.kernel_depth > 1 and a.gathered == 0:
            # Planes of the box are as far apart as its blocks, so one loop of a strip runs both.
            t.outer_count = t.outer_count * a.kernel_depth
            t.outer_a = t.middle_a
            t.outer_b = t.middle_b

    return set_weight_strides


def row_runner(form: DirectForm) -> Any:
    """Return ``f(a, t, run, x, y, residual, left)``, which computes a row of outputs.

    ``x``, ``y`` and ``residual`` (0: none) are addresses of its first pixel, ``left`` is the column
    of the image that the first tap of the first output reads.
    """
    mr, plain = form.mr, form.plain

    @register_jitable
    def run_strip(t: TileBlock, run: Run) -> None:
        """Run the strip; with an activation, in parts that stay in the L1 cache."""
        part = run.pixels if run.activation == 0 else _NEAR * mr
        c = t.c
        for i in range(0, run.pixels, part):
            count = min(part, run.pixels - i)
            call_kernel(run.strip, t, count, run.vectors, 0)
            if run.activation != 0:
                t.c = c + i * t.c_row
                call_kernel(run.activation, t, count, run.vectors, 0)
                t.c = c + (i + count) * t.c_row

    @register_jitable
    def run_tiles(
        a: DirectArguments, t: TileBlock, run: Run, x: int, y: int, residual: int, left: int
    ) -> None:
        """Run the tiles of a row."""
        weights, tile = t.b, a.tile
        dilated = not plain and a.dilation_width > 1 and a.kernel_width > 1 and a.gathered == 0
        share = t.pace * (run.steps // 2)  # bytes that a tile prefetches
        i = 0
        while i < run.pixels:
            rows = rows_of(run.pixels - i, mr)
            t.a = x + i * t.a_row
            t.c = y + i * t.c_row
            t.residual = residual + i * t.residual_row if residual != 0 else 0
            if run.continued:
                t.start = t.c
            # The tiles of a row together prefetch the weights of the next panel.
            t.ahead = t.ahead + share
            if dilated:
                _skip_columns(a, t, left + i * a.stride_width, rows, weights)
            call_kernel(tile, t, rows, run.vectors, 0)
            if run.activation != 0:
                call_kernel(run.activation, t, rows, run.vectors, 0)
            i += rows
        # `_skip_columns` has moved the weights of a tile to its first tap inside the image.
        t.b = weights

    @register_jitable
    def run_row(
        a: DirectArguments, t: TileBlock, run: Run, x: int, y: int, residual: int, left: int
    ) -> None:
        if run.strip == 0:
            run_tiles(a, t, run, x, y, residual, left)
            return
        t.a = x
        t.c = y
        t.residual = residual
        run_strip(t, run)

    return run_row

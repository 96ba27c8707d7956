"""The direct convolution kernel over contraction tiles: from the blocked or plain layout to blocks.

Blocked activations are ``[N][C / lanes][D][H][W][lanes]``. The last block is padded with channels
that must hold finite values, since their weights are zero. In 1-D and 2-D convolutions the missing
leading sizes are 1. Weights are packed per group as ``[panel][K][columns]``, like B in
``subgraph.ops.matmul.kernels``: a panel is ``nv`` blocks of output channels (the last one has the
rest) and K runs over ``(input block, kd, kh, kw, lane)``, or ``(channel, kd, kh, kw)`` for plain
input.

In all functions ``a`` is the view of the kernel's arguments and ``t`` that of the tile's, as in
`direct_tile_kernels`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numba.extending import register_jitable

from subgraph.engine.codegen.argument_views import stack_block, view_of
from subgraph.engine.codegen.simd import ld_i64
from subgraph.engine.codegen.tiling import TileBlock

from .arguments import DirectArguments
from .copy_kernels import Box, pixel_gatherer, strip_copier
from .direct_tile_kernels import (
    DirectForm,
    Run,
    border_skipper,
    is_partial,
    loop_setter,
    panel_setter,
    row_runner,
    skip_planes,
    stride_setter,
    strip_of,
    weights_locator,
)

_tile_block = stack_block(TileBlock)
_box = stack_block(Box)


class _Grid(NamedTuple):
    """How the outputs are divided into work units.

    Attributes:
        rows: Blocks of output rows.
        columns: Blocks of output columns.
        boxes: Blocks of output pixels of an image, over planes, rows and columns.
        panels: Panels of a group.
        panel_blocks: Blocks of panels of a group.
    """

    rows: int
    columns: int
    boxes: int
    panels: int
    panel_blocks: int


class _Outputs(NamedTuple):
    """The outputs of consecutive work units, which read the same pixels.

    Attributes:
        image: Index of the image.
        group: Index of the group of channels.
        box: Index of the block of output pixels among those of all images and groups.
        depth: Plane of the outputs.
        row: First row.
        column: First column.
        rows: Number of rows.
        columns: Number of columns.
        panel: First panel.
        last_panel: The panel after the last one.
        units: Number of work units.
    """

    image: int
    group: int
    box: int
    depth: int
    row: int
    column: int
    rows: int
    columns: int
    panel: int
    last_panel: int
    units: int


class _Inputs(NamedTuple):
    """The pixels that `_Outputs` read, in place or as they are copied to scratch.

    Attributes:
        x: Address of the first input block of the group in the image.
        depth: Plane of the image that the first tap of the first output reads; may be negative.
        row: Row that it reads.
        column: Column that it reads.
        row_bytes: Bytes between rows that tiles read.
        plane_bytes: Between planes; between taps if pixels are gathered.
        block_bytes: Between input blocks.
    """

    x: int
    depth: int
    row: int
    column: int
    row_bytes: int
    plane_bytes: int
    block_bytes: int


def direct(
    *, dtype: str, lanes: int, mr: int, nv: int, plain: bool, weights: str = ""
) -> Callable[..., None]:
    """Return the kernel of `DirectArguments`: convolution into the blocked layout.

    The arguments are those of `DirectForm`.
    """
    arguments = view_of(DirectArguments)
    form = DirectForm(dtype, lanes, mr, nv, plain, weights)
    set_strides, set_loops = stride_setter(form), loop_setter(form)
    count_units = _unit_counter(form)
    locate_inputs, load_segment = _input_locator(form), _segment_loader(form)
    run_panel = _panel_runner(form)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        t, window = _tile_block(), _box()
        set_strides(a, t)
        scratch = a.scratch
        if scratch != 0:
            scratch += worker * a.scratch_bytes
        grid = count_units(a)
        copied = -1  # the segment that is in scratch
        unit = begin
        while unit < end:
            outputs = _locate_outputs(a, grid, unit, end)
            unit += outputs.units
            inputs = locate_inputs(a, window, outputs, scratch)
            first = 0
            while first < a.input_blocks:
                last = _segment_end(a, first)
                row, plane, block = inputs.row_bytes, inputs.plane_bytes, inputs.block_bytes
                set_loops(a, t, row, plane, block, is_partial(a, first))
                segment = outputs.box * a.input_blocks + first
                source = load_segment(a, window, inputs, scratch, first, last, segment != copied)
                copied = segment
                # Bounds hold for finished sums; a partial sum may exceed them.
                t.flags = a.flags if last == a.input_blocks else 0
                for panel in range(outputs.panel, outputs.last_panel):
                    run_panel(a, t, outputs, inputs, source, panel, first, last)
                first = last

    return kernel


@register_jitable
def _segment_end(a: DirectArguments, first: int) -> int:
    """Return the input block after the segment that begins with block ``first``."""
    # The kernel leaves out the missing channels of a partial block for every tap, which takes loops
    # of its own (`set_loops`): that block is a segment by itself.
    last = min(first + a.segment, a.input_blocks)
    if last == a.input_blocks and first + 1 < last and is_partial(a, last - 1):
        last -= 1
    return last


def _unit_counter(form: DirectForm) -> Any:
    """Return ``f(a)``, which returns the `_Grid` of the arguments."""
    nv = form.nv

    @register_jitable
    def count_units(a: DirectArguments) -> _Grid:
        rows = (a.output_height + a.rows - 1) // a.rows
        columns = (a.output_width + a.columns - 1) // a.columns
        panels = (a.output_blocks + nv - 1) // nv
        panel_blocks = (panels + a.panels - 1) // a.panels
        return _Grid(rows, columns, a.output_depth * rows * columns, panels, panel_blocks)

    return count_units


@register_jitable
def _locate_outputs(a: DirectArguments, grid: _Grid, unit: int, end: int) -> _Outputs:
    """Return the outputs of ``unit`` and of those before ``end`` that it is joined with."""
    rest = unit % (grid.boxes * grid.panel_blocks)
    image = unit // (grid.boxes * grid.panel_blocks)
    units = 1
    if a.over_pixels == 0:
        box, panel = rest // grid.panel_blocks, rest % grid.panel_blocks * a.panels
        # Units of the same pixels share the copy of their input.
        units = min(end - unit, grid.panel_blocks - rest % grid.panel_blocks, a.joined)
    else:
        # Boxes are innermost where no copy of the input can be shared: consecutive units then use
        # the same weights.
        box, panel = rest % grid.boxes, rest // grid.boxes * a.panels
    row = box // grid.columns % grid.rows * a.rows
    column = box % grid.columns * a.columns
    return _Outputs(
        image // a.groups,
        image % a.groups,
        image * grid.boxes + box,
        box // grid.columns // grid.rows,
        row,
        column,
        min(a.rows, a.output_height - row),
        min(a.columns, a.output_width - column),
        panel,
        min(grid.panels, panel + units * a.panels),
        units,
    )


def _input_locator(form: DirectForm) -> Any:
    """Return ``f(a, window, outputs, scratch)``, which returns the `_Inputs` of outputs.

    With scratch it also sets ``window``, the box of pixels to be copied there; if pixels are
    gathered, its sizes are those of the outputs.
    """
    pixel = form.pixel

    @register_jitable
    def locate_inputs(a: DirectArguments, window: Box, outputs: _Outputs, scratch: int) -> _Inputs:
        image_block = a.image_depth * a.image_height * a.image_width * pixel
        x = a.x + outputs.image * a.x_image + outputs.group * a.input_blocks * image_block
        depths, rows, columns, taps = 1, outputs.rows, outputs.columns, 1
        # In place, the distances between rows, planes and blocks are those of the image.
        if scratch == 0:
            depths, rows, columns = a.image_depth, a.image_height, a.image_width
        elif a.gathered != 0:
            taps = a.kernel_depth * a.kernel_height * a.kernel_width
        else:
            depths = (a.kernel_depth - 1) * a.dilation_depth + 1
            rows = (rows - 1) * a.stride_height + (a.kernel_height - 1) * a.dilation_height + 1
            columns = (columns - 1) * a.stride_width + (a.kernel_width - 1) * a.dilation_width + 1
        depth = outputs.depth * a.stride_depth - a.pad_depth
        row = outputs.row * a.stride_height - a.pad_height
        column = outputs.column * a.stride_width - a.pad_width
        window.depth = depth
        window.row = row
        window.column = column
        window.depths = depths
        window.rows = rows
        window.columns = columns
        plane = rows * columns * pixel
        return _Inputs(x, depth, row, column, columns * pixel, plane, depths * plane * taps)

    return locate_inputs


def _segment_loader(form: DirectForm) -> Any:
    """Return ``f(a, window, inputs, scratch, first, last, changed)``: the address of pixels.

    They are the pixels of input blocks ``first`` to before ``last`` that the first output reads.
    With scratch, ``window`` is copied there if the segment has ``changed``.
    """
    copy_strip = strip_copier(form.dtype, form.lanes, form.plain)
    gather = pixel_gatherer(form.dtype, form.lanes, form.plain)
    pixel = form.pixel

    @register_jitable
    def load_segment(
        a: DirectArguments,
        window: Box,
        inputs: _Inputs,
        scratch: int,
        first: int,
        last: int,
        changed: bool,
    ) -> int:
        if scratch == 0:
            at = inputs.depth * inputs.plane_bytes + inputs.row * inputs.row_bytes
            return inputs.x + first * inputs.block_bytes + at + inputs.column * pixel
        x = inputs.x + first * a.image_depth * a.image_height * a.image_width * pixel
        if changed and a.gathered != 0:
            gather(a, x, scratch, last - first, window)
        elif changed:
            copy_strip(a, last - first, x, scratch, window)
        return scratch

    return load_segment


def _panel_locator(form: DirectForm) -> Any:
    """Return ``f(a, outputs, panel, done)``: the addresses of the first output and its residual.

    The latter is 0 if there is no residual, or if the sums are not ``done`` yet.
    """
    nv, block = form.nv, form.block

    @register_jitable
    def locate_panel(
        a: DirectArguments, outputs: _Outputs, panel: int, done: bool
    ) -> tuple[int, int]:
        to = (outputs.group * a.output_blocks + panel * nv) * a.y_block
        to += outputs.depth * a.y_plane + outputs.row * a.y_row + outputs.column * a.y_column
        to = to * block + a.y_offset
        residual = a.residual if done else 0
        if residual != 0:
            residual += outputs.image * a.residual_image + to
        return a.y + outputs.image * a.y_image + to, residual

    return locate_panel


def _panel_runner(form: DirectForm) -> Any:
    """Return ``f(a, t, outputs, inputs, source, panel, first, last)``: the outputs of a panel.

    It computes them, or continues their sums, over the input blocks ``first`` to before ``last``.
    ``source`` is the address of the pixels of block ``first`` that the first output reads.
    """
    mr, step, block = form.mr, form.step, form.block
    weights_at = weights_locator(form)
    set_panel, run_row = panel_setter(form, weights_at), row_runner(form)
    skip_border, locate_panel = border_skipper(form.plain), _panel_locator(form)

    @register_jitable
    def run_panel(
        a: DirectArguments,
        t: TileBlock,
        outputs: _Outputs,
        inputs: _Inputs,
        source: int,
        panel: int,
        first: int,
        last: int,
    ) -> None:
        partial, done = is_partial(a, first), last == a.input_blocks
        gathered = a.gathered != 0
        vectors = set_panel(a, t, outputs.group, panel, first, last)
        # After the last panel of a segment come the weights of the first panel's next segment.
        if panel + 1 == outputs.last_panel and not done:
            t.ahead = weights_at(a, outputs.group, outputs.panel, last)
        if a.bands != 0:
            # A band is three int64, see `DirectArguments`; the first is its first input block.
            source += ld_i64(a.bands + 24 * panel) * inputs.block_bytes
        if a.kernel_depth > 1 and not gathered and a.strip == 0:
            # Gathered taps are one loop, and a strip runs planes and blocks as one loop: neither
            # can leave out planes.
            source += skip_planes(a, t, inputs.depth) * a.dilation_depth * inputs.plane_bytes
        y, residual = locate_panel(a, outputs, panel, done)
        rows, pixels, down = outputs.rows, outputs.columns, inputs.row_bytes
        if not gathered:
            down = a.stride_height * down
        elif a.y_row == pixels * a.y_column:
            rows, pixels = 1, rows * pixels  # contiguous rows of outputs run as one row
        # All tiles of the unit read the same weights and together prefetch as many bytes, those of
        # the next panel.
        t.pace = 2 * t.b_step // max(1, rows * ((pixels + mr - 1) // mr))
        steps = (last - first) * a.kernel_depth * a.kernel_height * a.kernel_width * step
        activation = a.activation if done else 0
        run = Run(pixels, vectors, steps, first > 0, activation, strip_of(a, partial))
        weights = t.b
        for row in range(rows):
            skipped = 0
            if not gathered and a.kernel_height > 1:
                above = inputs.row + row * a.stride_height
                skipped = skip_border(a, t, above, weights, partial)
            x = source + row * down + skipped * a.dilation_height * inputs.row_bytes
            at = row * a.y_row * block
            run_row(a, t, run, x, y + at, residual + at if residual != 0 else 0, inputs.column)

    return run_panel

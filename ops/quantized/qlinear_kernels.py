"""Quantized convolutions and products over integer tiles, in blocks of 16 channels.

The input of a work unit is first copied to a patch in scratch memory, with its padding; see
`patches` and `subgraph.engine.codegen.tile_int`.

Weights are ``[group][panel][step][columns of the panel][2 or 4]``, steps over (block, kh, kw,
channel); see ``qlinear_packing.packed``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.engine.codegen.argument_views import stack_block, view_of
from subgraph.engine.codegen.arguments import Address
from subgraph.engine.codegen.dot import dot4
from subgraph.engine.codegen.matrix_registers import ROWS, full_rows, tile_use
from subgraph.engine.codegen.simd import (
    call_kernel,
    ld_i8,
    ld_u8,
    st_i8,
    st_i32,
    vec,
)
from subgraph.engine.codegen.tile import rows_of, stack_words
from subgraph.engine.codegen.tile_int import (
    BLOCK,
    IntegerTileBlock,
    integer_tile_shape,
    vector_bytes,
)
from subgraph.engine.codegen.tiling import MATRIX_TILE

from .arguments import QuantizedProductArguments
from .patches import Patch, PatchBox, patch_copier
from .qlinear_packing import LINE
from .saturation_kernels import (
    PAIRS,
    TileStrides,
    fault_finder,
    largest_finder,
)

# 4096 bytes: the largest tile, a matrix tile, is 32 rows of 2 vectors of 16 int32.
_corner = stack_words(512)
# 128 bytes: an int32 for each column of the widest panel, 32.
_start = stack_words(BLOCK)


class Unit(PatchBox):
    """A work unit: the box of its patch, and its output.

    Attributes:
        unit_rows: Rows of its output.
        unit_columns: Columns of its output.
        patch_row: Bytes of a row of the patch.
        tile: The integer tile.
        row_sums: Sums of the patch's rows less the zero point; 0: not needed.
    """

    unit_rows: int
    unit_columns: int
    patch_row: int
    tile: Address
    row_sums: Address


_tile_block, _unit = stack_block(IntegerTileBlock), stack_block(Unit)
_tile_strides = stack_block(TileStrides)


def product(
    *, dtype: str, output: str, flavour: str, weights: str, source: str
) -> Callable[..., None]:
    """Return the kernel of `QuantizedProductArguments`: quantized convolutions and products.

    Args:
        dtype: ``"uint8"`` or ``"int8"``: of the input.
        output: Dtype of the output; see ``tile_int.integer_contraction``.
        flavour: ``"pairs"``, ``"quads"``, ``"matrix"``, or, not for images, ``"checked"``.
        weights: Dtype of the packed weights, ``"int8"`` or ``"int16"``.
        source: ``"blocked"``, ``"image"`` or ``"rows"``.
    """
    arguments = view_of(QuantizedProductArguments)
    lanes, _, nv = integer_tile_shape()
    load_zero, width = ld_i8 if dtype == "int8" else ld_u8, nv * lanes
    prepare_patch = _patch_preparer(dtype, flavour, source)
    run_panels = _unit_runner(dtype, output, flavour, vector_bytes(flavour, weights, lanes))
    prepare, finish = tile_use(flavour == "matrix")

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        product = arguments(args)
        t, where, start = _tile_block(), _unit(), _start()
        groups, columns = product.groups, product.columns
        oh_n, ow_n = product.output_height, product.output_width
        rb, wb, pb = product.unit_rows, product.unit_columns, product.unit_panels
        scratch = product.scratch + worker * product.scratch_bytes
        row_blocks, col_blocks = (oh_n + rb - 1) // rb, (ow_n + wb - 1) // wb
        panel_blocks = ((columns + width - 1) // width + pb - 1) // pb
        od_n, plane = product.output_depth, row_blocks * col_blocks
        pixel, zero = product.pixel, load_zero(product.x_zero)
        volume = product.image_depth * product.image_height * product.image_width
        group_bytes = product.x_blocks * volume * BLOCK
        # Panels are innermost, so that units of the same pixels, which a thread takes one after the
        # other, copy their patch once.
        copied = -1
        prepare()
        for unit in range(begin, end):
            patch, panel = unit // panel_blocks, unit % panel_blocks * pb
            box, matrix = patch % (od_n * plane), patch // (od_n * plane)
            image, group = matrix // groups, matrix % groups
            od, box = box // plane, box % plane
            oh, ow = box // col_blocks * rb, box % col_blocks * wb
            first = (od * oh_n + oh) * ow_n + ow
            rows, cols = min(rb, oh_n - oh), min(wb, ow_n - ow)
            nh, nw = _patch_size(product, rows, cols)
            if patch != copied:
                _set_box(product, where, od, oh, ow, nh, nw)
                x = product.x + image * product.x_image + group * group_bytes
                scratch = prepare_patch(product, where, x, scratch, first * pixel, zero)
                copied = patch
            where.unit_rows = rows
            where.unit_columns = cols
            where.patch_row = nw * pixel
            where.tile = product.tile
            # Blocks are a patch apart, or an image apart if the image itself is read.
            plane_pixels = nh * nw if product.scratch != 0 else od_n * oh_n * ow_n
            _set_loops(product, t, nw * pixel, plane_pixels * pixel)
            y = product.y + image * product.y_image + first * product.y_pixel
            run_panels(product, t, where, start, scratch, y, image, group, panel, zero)
        finish()

    return kernel


def _patch_preparer(dtype: str, flavour: str, source: str) -> Any:
    """Return ``f(product, where, x, scratch, first, zero)``; the parameters: see `product`."""
    lanes, _, _ = integer_tile_shape()
    copy_patch, find_largest = patch_copier(dtype, flavour, source), largest_finder()
    sum_rows = _row_sums(lanes, 128 if dtype == "int8" else 0)
    correcting, shifting = flavour == "checked", source == "rows" and flavour != "pairs"

    @register_jitable
    def prepare_patch(
        product: QuantizedProductArguments, where: Unit, x: int, scratch: int, first: int, zero: int
    ) -> int:
        """Copy the patch of a unit, and find what corrections need; return the patch's address.

        Args:
            product: The arguments.
            where: The box of the patch; its sums of rows are set.
            x: Address of the group of the image.
            scratch: Address of the patch, if it is copied.
            first: Offset of the patch in the image if it is not copied, in bytes.
            zero: Zero point of the input.
        """
        # If the image has the layout of a patch, tiles read it in place (`qlinear_tiles_cpu`).
        if product.scratch != 0:
            copy_patch(_patch_of(product), x, scratch, zero, where)
        else:
            scratch = x + first
        # The largest bytes hold for all panels of the patch, so that they are found once for each
        # copy.
        if correcting:
            pixels = where.planes * where.rows * where.columns
            find_largest(product, scratch, pixels, scratch + product.largest_at)
        # Only rows of a matrix have sums: a window's sum would differ for each output pixel, and is
        # not needed, as convolutions with such zero points use ``pairs``.
        where.row_sums = 0
        if shifting and product.excess != 0:
            sum_rows(product, scratch, where.columns, zero)
            where.row_sums = scratch + product.row_sums_at
        return scratch

    return prepare_patch


def _unit_runner(dtype: str, output: str, flavour: str, step_bytes: int) -> Any:
    """Return ``f(product, t, where, start, scratch, y, image, group, panel, zero)``.

    The parameters are those of `product`; ``step_bytes`` are those of a vector of weights.
    """
    lanes, _, nv = integer_tile_shape()
    width, correcting = nv * lanes, flavour == "checked"
    start_sums, choose_tile = _start_sums(128 if dtype == "int8" else 0), _tile_chooser(step_bytes)
    run_panel = _panel_runner(1 if output in ("uint8", "int8") else 4, flavour == "matrix")

    @register_jitable
    def run_panels(
        product: QuantizedProductArguments,
        t: IntegerTileBlock,
        where: Unit,
        start: int,
        scratch: int,
        y: int,
        image: int,
        group: int,
        panel: int,
        zero: int,
    ) -> None:
        """Run the panels of a work unit over its patch.

        Args:
            product: The arguments.
            t: Arguments of the tile.
            where: The work unit.
            start: Scratch for the first values of a panel's sums.
            scratch: Address of the patch.
            y: Address of the first pixel of the output.
            image: Index of the image.
            group: Index of the group of channels.
            panel: First panel of the unit.
            zero: Zero point of the input.
        """
        columns, (steps, bound_row, bound_rows) = product.columns, _loop_sizes(product)
        panels = (columns + width - 1) // width
        for p in range(panel, min(panels, panel + product.unit_panels)):
            first = p * width
            column = group * columns + first
            # Bias and scale are those of a column of the operator; what depends on the weights is
            # different for each image if the weights are.
            own = column if product.weights_image == 0 else column + image * columns
            weights_at = product.weights + image * product.weights_image
            # Each vector of columns takes the same bytes in a panel of any width, so that this is
            # where the panel begins.
            t.b = weights_at + column // lanes * steps * step_bytes
            count = min(width, columns - first)
            t.bias = start_sums(product, start, column, own, zero, count)
            t.scale = product.scale + 4 * column
            t.shift = product.shift + 4 * column if product.shift != 0 else 0
            t.column_excess = product.excess + 4 * own
            at = y + group * product.y_group + first // BLOCK * product.y_block
            if correcting:
                bounds = product.bounds + (group * panels + p) * bound_rows * bound_row
                # Columns are whole blocks of 16, hence whole vectors.
                vectors = min(nv, (columns - first) // lanes)
                where.tile = choose_tile(product, t, bounds, scratch, vectors)
            run_panel(product, t, scratch, at, where, first)

    return run_panels


@register_jitable
def _loop_sizes(product: QuantizedProductArguments) -> tuple[int, int, int]:
    """Return the steps of a panel of weights, the bytes of a row of bounds, and their rows."""
    # Without dilation the taps of a kernel row are adjacent in the patch: they are one run, which
    # `inner` counts.
    lines = product.kernel_depth * product.kernel_height
    taps = lines * (1 if product.width_merged != 0 else product.kernel_width)
    steps = ((product.blocks - 1) * product.inner + product.last_inner) * 2 * taps
    bound_row = (product.blocks * product.inner * PAIRS + LINE - 1) // LINE * LINE
    return steps, bound_row, taps


@register_jitable
def _patch_size(product: QuantizedProductArguments, rows: int, columns: int) -> tuple[int, int]:
    """Return the rows and columns of the patch that ``rows`` x ``columns`` outputs read."""
    high = (product.kernel_height - 1) * product.dilation_height + 1
    wide = (product.kernel_width - 1) * product.dilation_width + 1
    return (rows - 1) * product.stride_height + high, (columns - 1) * product.stride_width + wide


@register_jitable
def _set_box(
    product: QuantizedProductArguments,
    box: PatchBox,
    plane: int,
    row: int,
    column: int,
    rows: int,
    columns: int,
) -> None:
    """Set the box of a patch of ``rows`` x ``columns`` for the output at the given indices."""
    box.plane = plane * product.stride_depth - product.pad_depth
    box.planes = product.kernel_depth
    box.plane_step = product.dilation_depth
    box.row = row * product.stride_height - product.pad_height
    box.column = column * product.stride_width - product.pad_width
    box.rows = rows
    box.columns = columns


@register_jitable
def _patch_of(product: QuantizedProductArguments) -> Patch:
    """Return the sizes of an image and of the pixels of its patch."""
    return (
        product.x_blocks,
        product.image_depth,
        product.image_height,
        product.image_width,
        product.channels,
        product.pixel,
    )


def _row_sums(lanes: int, flip: int) -> Any:
    """Return ``f(product, scratch, rows, zero)``, which sums the rows of a patch of rows.

    ``flip`` is 128 if the patch has signed bytes plus 128, else 0.
    """
    quads, dot = vec("int32", lanes), dot4(lanes)
    zero_quads, ones, load_quads, add_up = quads.zero, quads.splat, quads.load_n, quads.sum

    @register_jitable
    def sum_rows(product: QuantizedProductArguments, scratch: int, rows: int, zero: int) -> None:
        """Write the sum of the bytes of each row, each less the zero point."""
        # The bytes that complete a row are the zero point, too, so that they subtract to 0.
        step = product.pixel
        for r in range(rows):
            total = zero_quads()
            for k in range(0, step // 4, lanes):
                part = load_quads(scratch + r * step + 4 * k, min(lanes, step // 4 - k))
                total = dot(total, part, ones(0x01010101))
            st_i32(scratch + product.row_sums_at + 4 * r, add_up(total) - step * (zero + flip))

    return sum_rows


def _start_sums(flip: int) -> Any:
    """Return ``f(product, start, column, own, zero, count)``: first values of a panel's sums.

    ``flip`` is 128 if the patch has signed bytes plus 128, else 0.
    """
    whole = vec("int32", BLOCK)
    load_sums, store_sums, splat_sum = whole.load, whole.store, whole.splat

    @register_jitable
    def start_sums(
        product: QuantizedProductArguments,
        start: int,
        column: int,
        own: int,
        zero: int,
        count: int,
    ) -> int:
        """Return the address of the first values of a panel's sums: the bias, or ``start``.

        ``column``: the panel's first column among those of all groups. ``own``: the same among
        those of all images, if each has its own weights. ``count``: columns of the panel.
        """
        bias: int = product.bias + 4 * column
        if product.weight_sums == 0:
            return bias
        # The zero point of x or the weights are computed at run time, so that their share could not
        # be added to the bias when the plan was made. Bytes of the patch are unsigned: the zero
        # point of signed ones is 128 more, too.
        factor = splat_sum(zero + flip)
        for i in range(0, 4 * count, 4 * BLOCK):
            sums = load_sums(product.weight_sums + 4 * own + i)
            store_sums(start + i, load_sums(bias + i) - factor * sums)
        return start

    return start_sums


def _tile_chooser(step_bytes: int) -> Any:
    """Return ``f(product, t, bounds, scratch, vectors)``: the tile of a panel (checked).

    ``step_bytes`` are those of a vector of weights.
    """
    find_faults = fault_finder()

    @register_jitable
    def choose_tile(
        product: QuantizedProductArguments,
        t: IntegerTileBlock,
        bounds: int,
        scratch: int,
        vectors: int,
    ) -> int:
        """List the faults of a panel; return its tile, that of quads if there are too many."""
        # Faults depend on the weights of a panel, so that another panel of the same patch may need
        # none.
        strides, most = _tile_strides(), product.most_faults
        strides.block = t.outer_a * product.kernel_depth
        strides.plane = t.outer_a
        strides.row = t.middle_a
        strides.tap = t.inner_a
        strides.step = step_bytes * vectors
        reach, to = scratch + product.largest_at, scratch + product.faults_at
        count = find_faults(product, bounds, reach, to, most, strides)
        t.saturated_count = count
        t.saturated_steps = to
        # The tile of quads has no 16-bit sums. It is slower without VNNI, yet faster than many
        # corrections (estimate).
        tile: int = product.tile if count <= most else product.quads_tile
        return tile

    return choose_tile


@register_jitable
def _set_loops(
    product: QuantizedProductArguments, t: IntegerTileBlock, row: int, plane: int
) -> None:
    """Write the loops of a tile: ``row`` bytes of a row of the patch, ``plane`` of a plane."""
    kh, kw = product.kernel_height, product.kernel_width
    dh, dw = product.dilation_height, product.dilation_width
    pixel = product.pixel
    t.a_row = product.stride_width * pixel
    # The planes of a patch are as far apart as its blocks, so that one loop runs over both.
    t.outer_count = product.blocks * product.kernel_depth
    t.outer_a = plane
    t.middle_count = kh
    t.middle_a = dh * row
    t.inner_count = 1 if product.width_merged != 0 else kw
    t.inner_a = dw * pixel
    t.steps = product.inner
    t.last_steps = product.last_inner
    t.c_row = product.y_pixel
    t.c_block = product.y_block
    t.low = product.low
    t.high = product.high
    t.zero = product.y_zero
    t.residual_scales = product.residual_scales
    t.residual_zero = product.residual_zero
    t.sum_low = product.sum_low
    t.sum_high = product.sum_high
    t.sum_zero = product.sum_zero


def _panel_runner(item: int, matrix: bool) -> Any:
    """Return ``f(product, t, x, y, where, first)``: the tiles of a panel over a patch.

    ``item`` are the bytes of an element of the output; ``matrix``: the tiles are matrix tiles.
    """
    lanes, mr, nv = integer_tile_shape()
    width = nv * lanes
    next_rows = rows_of
    if matrix:
        mr, next_rows = MATRIX_TILE[0], full_rows

    @register_jitable
    def copy_corner(corner: int, to: int, crs: int, rows: int, count: int) -> None:
        """Copy the ``count`` columns that exist from a tile that was written to ``corner``."""
        for i in range(rows):
            for j in range(count * item):
                st_i8(to + i * crs + j, ld_i8(corner + i * width * item + j))

    @register_jitable
    def run_panel(
        product: QuantizedProductArguments,
        t: IntegerTileBlock,
        x: int,
        y: int,
        where: Unit,
        first: int,
    ) -> None:
        """Run the tiles of one panel over a patch.

        Args:
            product: The arguments.
            t: Arguments of the tile.
            x: Address of the patch.
            y: Address of the first pixel of the output.
            where: The work unit.
            first: First column of the panel.
        """
        rows, cols = where.unit_rows, where.unit_columns
        vectors = min(nv, (product.columns - first) // lanes)
        stored = product.stored - first
        crs, row_out = product.y_pixel, product.output_width * product.y_pixel
        row_in = where.patch_row * product.stride_height
        # Tiles store whole vectors. Columns that y does not have would overwrite the next pixel or
        # lie behind y, so that such a tile is stored to the stack first.
        cut = stored < vectors * lanes
        corner = _corner()
        t.c_row = width * item if cut else crs
        t.c_block = BLOCK * item if cut else product.y_block
        # Two short rows are a matrix tile: with a register of each, no product waits for the
        # previous one of the same sums.
        in_pairs = matrix and cols <= ROWS and 2 * cols > ROWS and cols * crs == row_out
        height = 2 if in_pairs else 1
        t.a_register = row_in if in_pairs else ROWS * t.a_row
        gap = ROWS - cols if in_pairs else 0
        t.run_rows, t.first_run, t.gap_rows = cols if in_pairs else 0, cols, gap
        for r in range(0, rows, height):
            i, width_out = 0, min(height, rows - r) * cols
            while i < width_out:
                m = next_rows(width_out - i, mr)
                to = y + r * row_out + i * crs
                t.a = x + r * row_in + i * t.a_row
                t.c = corner if cut else to
                t.residual = to + (product.residual - product.y)
                t.row_sums = where.row_sums + 4 * i if where.row_sums != 0 else 0
                # The rows of a tile include those between the two rows of outputs.
                call_kernel(where.tile, t, m + (gap if m > cols else 0), vectors, 0)
                if cut:
                    copy_corner(corner, to, crs, m, stored)
                i += m

    return run_panel

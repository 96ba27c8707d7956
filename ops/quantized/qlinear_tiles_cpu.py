"""The step of a quantized convolution or product over integer tiles: units, scratch, arguments."""

from __future__ import annotations

from typing import Any

import attrs

from subgraph.engine.planner.lowering import Lowering
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.ops.movement.geometry import Geometry
from subgraph.ops.shared.tile_planning import grain, round_up, shared, units_wanted
from subgraph.system.host import caches

from .arguments import QuantizedProductArguments
from .qlinear_operands import QuantizedOperands, Requantization, Weights, zero_point_argument
from .qlinear_packing import LINE, Flavour, PatchSource, Tile


@attrs.frozen
class Shape:
    """Sizes of a product's source and output; `QuantizedProductArguments` defines most of them.

    Attributes:
        source: Source of the patches.
        blocks: Input blocks of a group.
        pixel: Bytes of a pixel in a patch.
        inner: Double steps of the inner loop.
        last_inner: Double steps of its last iteration.
        width_merged: The inner loop runs over the width of the kernel, too.
        columns: Outputs of a group, rounded up to 16.
        stored: Outputs of a group that are stored.
        channels: Channels of an image, or elements of a row.
        x_blocks: Blocks of 16 channels of a group of the input.
        x_image: Bytes between images of the input.
        y_image: Bytes between images of the output.
        y_group: Bytes between groups of an image of the output.
        y_pixel: Bytes between pixels of the output.
        y_block: Bytes between blocks of 16 outputs.
    """

    source: PatchSource
    blocks: int
    pixel: int
    inner: int
    last_inner: int
    width_merged: bool
    columns: int
    stored: int
    channels: int
    x_blocks: int
    x_image: int
    y_image: int
    y_group: int
    y_pixel: int
    y_block: int

    def arguments(self) -> dict[str, Any]:
        """Return the fields of `QuantizedProductArguments` that these sizes are."""
        fields = attrs.asdict(self, recurse=False)
        del fields["source"]
        return fields


def _cut_tiles(low: Lowering, tile: Tile, g: Geometry, shape: Shape) -> tuple[int, int, int, int]:
    """Return the rows, columns and panels of a unit, and all panels.

    The input of a unit fills at most half of the L2 cache (estimate).
    """
    deep, high, wide = g.target
    most, each = caches().l2 // 2, shape.blocks * g.kernel[0] * shape.pixel
    # Rows are halved first, as long rows keep the tiles full; planes of the result are units
    # anyway.
    rows = g.outputs_within(1, most, each * g.reach(2, wide))
    columns = g.outputs_within(2, most, each * g.reach(1, rows), tile.mr)
    panels = -(-shape.columns // (tile.lanes * tile.nv))
    # Rows, then columns, then panels: units of the same pixels on several threads would copy and
    # check the same patch, each for itself.
    wanted, outer = units_wanted(low.threads), g.images * g.groups * deep
    rows = shared(rows, high, outer * -(-wide // columns), wanted, 1, 1)
    down = outer * -(-high // rows)
    columns = shared(columns, wide, down, wanted, 2 * tile.mr, tile.mr)
    part = shared(panels, panels, down * -(-wide // columns), wanted, 1, 1)
    return rows, columns, part, panels


def _scratch_areas(
    tile: Tile, g: Geometry, shape: Shape, unit: tuple[int, int], *, has_excess: bool
) -> tuple[int, dict[str, int]]:
    """Return the bytes of a worker's scratch memory, and the arguments about its areas.

    The areas follow the patch: the largest bytes of it, the list of faults, and sums of rows.

    Args:
        tile: The tile.
        g: Which pixels of the input a pixel of the result reads.
        shape: Sizes of source and result.
        unit: Output rows and columns of a unit.
        has_excess: Sums of rows are needed.
    """
    rows, columns = unit
    pixels = g.kernel[0] * g.reach(1, rows) * g.reach(2, columns)
    patch = shape.blocks * pixels * shape.pixel
    # A tile may read up to 64 bytes after the last pixel, whose weights are zero; a matrix tile
    # reads whole registers of pixels.
    beyond = 64 + (tile.mr * g.strides[2] * shape.pixel if tile.matrix else 0)
    largest_at = faults_at = nbytes = round_up(patch + beyond, 64)
    faults = 0
    if tile.flavour == "checked":
        taps = g.kernel[0] * g.kernel[1] * (1 if shape.width_merged else g.kernel[2])
        # A quarter of the steps: with more corrections the exact tile is faster (estimate).
        faults = shape.blocks * taps * shape.inner // 2
        faults_at = largest_at + round_up(4 * shape.blocks * shape.inner, LINE) + 64
        nbytes = round_up(faults_at + 16 * faults, 64)
    row_sums_at = nbytes
    # A unit of such a product is one line of rows, so that its columns are all its rows.
    if has_excess:
        nbytes = round_up(row_sums_at + 4 * columns, 64)
    return nbytes, {
        "largest_at": largest_at,
        "faults_at": faults_at,
        "most_faults": faults,
        "row_sums_at": row_sums_at,
    }


def _reads_in_place(
    q: QuantizedOperands, tile: Tile, g: Geometry, shape: Shape, weights: Weights
) -> bool:
    """Return whether tiles read the input itself instead of a patch that is copied from it."""
    # The input has the layout of a patch: no padding of rows, and no sums are needed.
    is_patch = shape.source == "blocked" or (
        shape.source == "rows" and shape.pixel == shape.channels and weights.excess == 0
    )
    bytes_as_stored = is_patch and q.x.dtype == "uint8" and tile.flavour == "quads"
    return bytes_as_stored and g.reads_each_pixel


def emit_tiles(
    q: QuantizedOperands, tile: Tile, g: Geometry, shape: Shape, weights: Weights,
    sums: Requantization, *, weights_image: int = 0,
) -> None:  # fmt: skip
    """Emit a convolution, or a product as one whose pixels are rows.

    Args:
        q: The operands.
        tile: Its tile.
        g: Which pixels of the input a pixel of the result reads.
        shape: Sizes of source and result.
        weights: The weights.
        sums: How the sums become the result.
        weights_image: Bytes between the weights of images (0: all have the same).
    """
    low = q.low
    rows, columns, part, panels = _cut_tiles(low, tile, g, shape)
    unit, has_excess = (rows, columns), weights.excess != 0
    nbytes, areas = _scratch_areas(tile, g, shape, unit, has_excess=has_excess)
    in_place = _reads_in_place(q, tile, g, shape, weights)
    checked = tile.flavour == "checked"
    least, most, zero = q.bounds
    arguments = QuantizedProductArguments(
        x=q.x,
        weights=weights.packed,
        y=q.y,
        **attrs.asdict(sums, recurse=False),
        groups=g.groups,
        **shape.arguments(),
        **g.arguments(),
        tile=_tile_kernel(tile.flavour, tile, q),
        low=least,
        high=most,
        y_zero=zero,
        x_zero=zero_point_argument(low, q.x_zero, q.x.dtype),
        unit_rows=rows,
        unit_columns=columns,
        unit_panels=part,
        **low.worker_scratch(None if in_place else nbytes),
        excess=weights.excess,
        weights_image=weights_image,
        quads_tile=_tile_kernel("quads", tile, q) if checked else 0,
        bounds=weights.bounds,
        **areas,
        **_residual_arguments(q),
    )
    boxes = g.target[0] * -(-g.target[1] // rows) * -(-g.target[2] // columns)
    count = g.images * g.groups * boxes * -(-panels // part)
    low.emit(
        Kernel(
            "subgraph.ops.quantized.qlinear_kernels", "product",
            dtype=q.x.dtype, output=q.y.dtype, flavour=tile.flavour, weights=tile.weights,
            source=shape.source,
        ),
        arguments,
        count,
        grain=grain(count, g.flops // 2),
        flops=g.flops,
        bytes=q.x.nbytes + q.w.nbytes + q.y.nbytes * (2 if q.residual else 1),
    )  # fmt: skip


def _residual_arguments(q: QuantizedOperands) -> dict[str, Any]:
    """Return the fields of `QuantizedProductArguments` about a residual."""
    names = ("residual", "residual_scales", "residual_zero", "sum_low", "sum_high", "sum_zero")
    values: tuple[Any, ...] = (0, 0, 0, 0.0, 0.0, 0)
    if q.residual is not None:
        values = (q.residual.bytes, q.residual.scales, q.residual.zero, *q.residual.bounds)
    return dict(zip(names, values, strict=True))


def _tile_kernel(flavour: Flavour, tile: Tile, q: QuantizedOperands) -> Kernel:
    """Return the integer tile of a flavour."""
    options = {} if q.residual is None else {"residual": True}
    if flavour == "matrix":
        return Kernel(
            "subgraph.engine.codegen.matrix_tile_int", "integer_contraction",
            output=q.y.dtype, **options,
        )  # fmt: skip
    return Kernel(
        "subgraph.engine.codegen.tile_int", "integer_contraction",
        flavour=flavour, weights=tile.weights, output=q.y.dtype, **options,
    )  # fmt: skip

"""Matrix products on the CPU device: MatMul, Gemm and their fused form, with one blocked kernel.

B is packed into panels: once, through the weight cache, if it is a weight; otherwise in each run
before the product, unless A has so few rows that reading B unpacked is faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import attrs
import numpy as np

from subgraph.engine.codegen.tiling import MATRIX_DEPTH, MATRIX_ROWS
from subgraph.engine.planner.lowering import Lowering, Unsupported, lowering
from subgraph.engine.planner.operands import Argument, Layout, Operand
from subgraph.engine.planner.views import in_blocks
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.graph.symbolic import is_symbolic, larger, recorded, smaller
from subgraph.graph.types import Array
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.checks.cpu import emit_range_check
from subgraph.ops.elementwise.cpu import emit_expression, source, temporary
from subgraph.ops.elementwise.expressions import Expression
from subgraph.ops.movement.layout_conversion import is_read_by, multiplies, reads_view
from subgraph.ops.movement.packing import matrix_panels
from subgraph.ops.shared.delegation import viewed
from subgraph.ops.shared.tile_planning import (
    FLOATS,
    NO_ACTIVATION,
    Tiles,
    activation,
    direct_tiles,
    even_part,
    grain,
    matrix_tiles,
    product_tiles,
    round_up,
    shared,
    tiles,
    units_wanted,
    weight_tiles,
)
from subgraph.system.host import caches

from .arguments import (
    GemmArguments,
    GroupedGemmArguments,
    PackRightArguments,
    RoundRowsArguments,
)
from .integer_gemm_cpu import INTEGERS, emit_integer_product
from .products import (
    Matrix,
    Product,
    batch_steps,
    batched,
    factors_of,
    is_transposed,
    matrices_of,
    matrix,
)

# Rows up to which tiles do not prefetch a packed B. With weights of 1024 x 2816 in no cache, 8 rows
# take 2.5 times as long without prefetches, but 4 rows 0.84 of the time (Zen 5).
_MAX_ROWS_WITHOUT_PREFETCH = 5
# Rows and columns from which on rounding computed operands costs less than it saves (estimate).
_MIN_ROUNDED_EDGE = 2 * MATRIX_ROWS
_MAX_UNIT_PANELS = 12  # panels of a unit at most (estimate)
# Heights of tiles up to which all rows of A form a single block, and of a block of more rows
# (estimates).
_MAX_SINGLE_BLOCK_TILES, _BLOCK_TILES = 16, 8
_INDICES = ("int32", "int64")
_LAYOUTS: tuple[Layout, ...] = ("plain", "registers", "strided")
_GROUP_ROWS = 64  # rows that a grouped product computes together (estimate)


@lowering("MatMul", "Gemm", dtypes=(*FLOATS, *INTEGERS), layouts=_LAYOUTS)
@lowering("FusedMatMul", domain=INTERNAL_DOMAIN, dtypes=FLOATS, layouts=_LAYOUTS)
def matmul(node: Node, low: Lowering) -> None:
    """Lower MatMul, Gemm, and their fused form with a residual and an activation."""
    if low.input(0).dtype in INTEGERS:
        _integer_gemm(node, low)
        return
    (a, b), out = factors_of(node, low.input(0), low.input(1)), low.output()
    alpha, beta = (float(node.attrs.get(name, 1.0)) for name in ("alpha", "beta"))
    act = activation(node, tiles(out.dtype), low)
    bias, residual = low.optional(2), low.optional(3)
    emit_product(low, Product(a, b, out, act, alpha, beta, bias, residual))


def _integer_gemm(node: Node, low: Lowering) -> None:
    """Lower MatMul or Gemm of integers, without transposition and with alpha = beta = 1."""
    attributes = {"transA": 0, "transB": 0, "alpha": 1.0, "beta": 1.0}
    if any(node.attrs.get(name, value) != value for name, value in attributes.items()):
        raise Unsupported("a Gemm of integers that is scaled or transposed")
    added, y = low.optional(2), low.output()
    product = y if added is None else temporary(low, y.dtype, y.shape)
    emit_integer_product(low, low.input(0), low.input(1), product)
    if added is not None:
        e = Expression()
        total = e("add", e.input(y.dtype), e.input(y.dtype))
        emit_expression(low, e, [source(product), source(added)], [(total, y)])


@lowering("FusedDistances", domain=INTERNAL_DOMAIN, dtypes=FLOATS)
def distances(node: Node, low: Lowering) -> None:
    """Lower FusedDistances to a product whose tiles sum squares of differences."""
    x, y, out = low.input(0), low.input(1), low.output()
    a = matrix(viewed(low, x, (*x.shape[:-2], x.shape[-1])))
    b = matrix(viewed(low, y, (*y.shape[:-3], *y.shape[-2:]))).transposed
    of = attrs.evolve(direct_tiles(out.dtype), squares=True)
    emit_product(low, Product(a, b, out, NO_ACTIVATION, tiles=of))


@lowering("FusedGroupedMatMul", domain=INTERNAL_DOMAIN, dtypes=FLOATS)
def grouped(node: Node, low: Lowering) -> None:
    """Lower FusedGroupedMatMul: for each row of the operand a product with the matrix of its index.

    The inputs are the matrices, ``[E, M, K]`` with ``matrix_first`` and ``[E, K, N]`` without, the
    indices and the rows. The products are float32 whatever the option ``INFERENCE_PRECISION`` says.
    """
    weights, indices, x, out = low.input(0), low.input(1), low.input(2), low.output()
    if not weights.constant or indices.known is not None or indices.dtype not in _INDICES:
        raise Unsupported("a grouped product of computed matrices, or with constant indices")
    b = matrix(weights).transposed if node.attrs.get("matrix_first") else matrix(weights)
    rows, n, depth = indices.size, b.columns, b.rows
    if not out.size or not x.size or x.size != rows * depth or out.size != rows * n:
        raise Unsupported("a grouped product without elements, or of vectors that broadcast")
    emit_range_check(low, indices, "indices", -weights.shape[0], weights.shape[0] - 1)
    product = Product(Matrix(x, (), rows, depth, depth, 1), b, out, NO_ACTIVATION)
    of = weight_tiles(direct_tiles(out.dtype), low, weights)
    right, _, steps = _right_side(low, product, of, rows, [0, 0, n * depth])
    panels, item = -(-n // of.width), of.item
    wanted = units_wanted(low.threads)
    block_panels = shared(smaller(panels, _MAX_UNIT_PANELS), panels, weights.shape[0], wanted, 1, 1)
    group = smaller(rows, _GROUP_ROWS)
    arguments = GroupedGemmArguments(
        a=x,
        b=right,
        c=out,
        init=0,
        residual=0,
        m=rows,
        n=n,
        k=depth,
        a_row=depth * item,
        a_column=item,
        a_register=0,
        a_blocks=1,
        a_block=0,
        c_row=n * item,
        c_vector=of.lanes * item,
        residual_row=0,
        residual_vector=0,
        c_register=0,
        b_row=0,
        tile=of.contraction(ahead=True),
        masked_tile=of.contraction(masked=True, ahead=True),
        **NO_ACTIVATION.arguments(),
        block_rows=group,
        block_panels=block_panels,
        **batch_steps((1, 1, 1), [(0, 0, 0), steps, (0, 0, 0)], of),
        rows_first=0,
        indices=indices,
        matrices=weights.shape[0],
        **low.worker_scratch(group * (8 + (depth + n) * item)),
    )
    units, flops = weights.shape[0] * -(-panels // block_panels), 2 * rows * n * depth
    moved = rows * (depth + n) * item + weights.size * of.weight_item
    kernel = Kernel("subgraph.ops.matmul.kernels", "grouped", index=indices.dtype, **of.variant)
    low.emit(
        kernel, arguments, units, grain=grain(units, flops + 2 * moved), flops=flops, bytes=moved
    )


def emit_product(low: Lowering, product: Product) -> None:
    """Emit the steps of a product.

    Raises:
        Unsupported: No kernel can compute it.
    """
    a, b, out = product.a, product.b, product.out
    bias, residual = product.bias, product.residual
    few = out.size <= _MAX_ROWS_WITHOUT_PREFETCH * b.columns
    of = tiles(out.dtype) if few else direct_tiles(out.dtype)
    if any(o is not None and o.layout != "plain" for o in (b.operand, bias)):
        raise Unsupported("a right operand or bias in another layout than the plain one")
    view = any(o is not None and o.layout == "strided" for o in (a.operand, residual))
    if view and math.prod(b.shape) != 1:
        raise Unsupported("a product of several matrices with a view")
    if a.columns != b.rows:
        raise Unsupported(f"a product of depths {a.columns} and {b.rows}")
    if not out.size:
        return
    n = b.columns
    init: Argument = 0
    added: Argument = residual or 0
    if bias is not None and product.beta != 0.0:
        if bias.size in (1, n) and (bias.size == 1 or bias.shape[-1] == n):
            init = _scaled_bias(low, bias, (n,), product.beta, of)
        elif residual is not None:
            raise Unsupported("a matrix added besides a residual")
        else:
            added = _scaled_bias(low, bias, out.shape, product.beta, of)
    _emit(low, product, of, init, added)


def _scaled_bias(
    low: Lowering, bias: Operand, shape: tuple[int, ...], beta: float, of: Tiles
) -> Argument:
    """Return ``beta * C`` broadcast to ``shape``; a constant row is padded to whole vectors."""
    is_row = len(shape) == 1
    if bias.size == math.prod(shape) and beta == 1.0 and not (is_row and bias.constant):
        return bias
    if bias.constant:

        def make(array: Array) -> Array:
            scaled = (array.reshape(-1) if is_row else array) * np.asarray(beta, of.dtype)
            whole = np.ascontiguousarray(np.broadcast_to(scaled, shape))
            return np.pad(whole, (0, -whole.size % of.lanes)) if is_row else whole

        return low.weight(f"gemm C {shape} x {beta!r} {of.lanes}", make, bias)
    spread = temporary(low, bias.dtype, shape)
    e = Expression()
    value = e("mul", e.input(bias.dtype), e.number(beta, bias.dtype))
    own = (bias.size,) if is_row else bias.shape
    emit_expression(low, e, [source(bias, own)], [(value, spread)])
    return spread


def _emit(low: Lowering, product: Product, of: Tiles, init: Argument, residual: Argument) -> None:
    """Emit the kernel `gemm`, with the steps that pack its operands.

    Args:
        low: Collects the plan's steps and scratch memory.
        product: The product.
        of: The contraction tiles of its dtype.
        init: Initial values of sums, one for each column; 0: zeros.
        residual: Matrix added at the end; 0: none.
    """
    a, sizes, steps = batched(product.a, product.b)
    # A size that may change, as the number of tokens, may be 1 in later runs.
    least = math.prod([size for size in product.out.shape[:-1] if not is_symbolic(size)])
    of = product.tiles or product_tiles(of, low, product.b.operand, least)
    if _rounds_operands(product):
        of = matrix_tiles(low, of.dtype) or of
    right, row_of_right, b_steps = _right_side(low, product, of, a.rows, steps[1])
    left, places, a_steps = _left_side(low, a, of, steps[0])
    item, count = of.item, math.prod(sizes)
    m, n, depth = a.rows, product.b.columns, a.columns
    panels = -(-n // of.width)
    mb, pb = _blocks(low.threads, count, m, panels, depth, of)
    registers = of.operands and count == 1 and _is_read_as_registers(low, product.out)
    if registers:
        product.out.store_as("registers")
    elif count == 1 and reads_view(low, product.out, of.lanes):
        product.out.layout, product.out.view = "strided", in_blocks(product.out.shape, of.lanes)
    residual_row, residual_vector = _steps_of(residual, n, of)
    c_row, c_vector = _steps_of(product.out, n, of)
    arguments = GemmArguments(
        a=left,
        b=right,
        c=product.out,
        init=init,
        residual=residual,
        m=m,
        n=n,
        k=depth,
        **places,
        c_row=c_row,
        c_vector=c_vector,
        residual_row=residual_row,
        residual_vector=residual_vector,
        c_register=MATRIX_ROWS * n * of.weight_item if registers else 0,
        b_row=row_of_right,
        tile=of.contraction(ahead=True),
        masked_tile=of.contraction(masked=True, ahead=True),
        **product.act.arguments(),
        block_rows=mb,
        block_panels=pb,
        **batch_steps(sizes, [a_steps, b_steps, steps[2]], of),
        rows_first=1 if m > mb else 0,
    )
    units = count * -(-m // mb) * -(-panels // pb)
    flops = 2 * count * m * n * depth
    moved = (a.operand.size + 2 * count * m * n) * item + count * n * depth * of.weight_item
    low.emit(
        Kernel("subgraph.ops.matmul.kernels", "gemm", **of.variant),
        arguments,
        units,
        grain=grain(units, flops + 2 * moved),
        flops=flops,
        bytes=moved,
    )


def _steps_of(result: Argument, columns: int, of: Tiles) -> tuple[int, int]:
    """Return the bytes between rows and between vectors of a result or residual.

    Raises:
        Unsupported: It is a view that is no image in blocks of vectors.
    """
    vector = of.lanes * of.item
    if not isinstance(result, Operand) or result.layout != "strided":
        return columns * of.item, vector
    stored = matrix(result)
    if stored.block != of.lanes:
        raise Unsupported("a result or residual in blocks of other widths")
    return vector, stored.block_step * of.item


def _rounds_operands(product: Product) -> bool:
    """Return whether a product of computed operands is large enough to round them in every run."""
    a, b = product.a, product.b
    if product.tiles or b.operand.constant or product.panels is not None or product.alpha != 1.0:
        return False
    if 1 not in (b.row_step, b.column_step):
        return False
    return min(a.rows, b.columns) >= _MIN_ROUNDED_EDGE and b.rows >= MATRIX_ROWS


def _left_side(
    low: Lowering, a: Matrix, of: Tiles, steps: Sequence[int]
) -> tuple[Argument, dict[str, int], Sequence[int]]:
    """Return A, its strides as fields of `GemmArguments`, and those along the batch in elements.

    Matrix tiles read registers, which a step of its own rounds.
    """
    if a.operand.layout == "registers":
        if not of.operands or a.shape or a.column_step != 1:
            raise Unsupported("a product of another form than the one that is expected")
        return a.operand, _register_places(a, of), steps
    if not of.operands:
        places = {"a_row": a.row_step * of.item, "a_column": a.column_step * of.item}
        blocks = a.columns // a.block if a.block else 1
        places |= {"a_register": 0, "a_blocks": blocks, "a_block": a.block_step * of.item}
        return a.operand, places, steps
    matrices, matrix_size = math.prod(a.shape), max(a.rows * a.columns, 1)
    registers = -(-a.rows // MATRIX_ROWS)
    depth = round_up(a.columns, of.depth_step)
    size = registers * MATRIX_ROWS * depth
    target = low.scratch(matrices * size * of.weight_item)
    low.emit(
        Kernel("subgraph.ops.matmul.kernels", "round_rows"),
        RoundRowsArguments(
            source=a.operand,
            target=target,
            rows=a.rows,
            depth=a.columns,
            row_step=a.row_step * of.item,
            column_step=a.column_step * of.item,
            source_matrix=matrix_size * of.item,
            block=a.block,
            block_step=a.block_step * of.item,
        ),
        matrices * registers,
        grain=grain(matrices * registers, 4 * matrices * size),
        bytes=matrices * size * (of.item + of.weight_item),
    )
    return target, _register_places(a, of), [step // matrix_size * size for step in steps]


def _register_places(a: Matrix, of: Tiles) -> dict[str, int]:
    """Return the strides of A's registers as fields of `GemmArguments`."""
    row, depth = of.depth_step * of.weight_item, round_up(a.columns, of.depth_step)
    places = {"a_row": row, "a_column": MATRIX_ROWS * row, "a_blocks": 1, "a_block": 0}
    return places | {"a_register": MATRIX_ROWS * depth * of.weight_item}


def _is_read_as_registers(low: Lowering, out: Operand) -> bool:
    """Return whether all readers of a product's result read it as registers of matrix tiles.

    The answer is an estimate: the plan converts the value for a reader that needs float32.
    """
    node = low.node
    if out is not low.outputs[0] or out.dtype != "float32" or out.shape[-1] % MATRIX_DEPTH:
        return False
    return len(node.outputs) == 1 and is_read_by(node, multiplies)


def _blocks(
    threads: int, batch: int, m: int, panels: int, depth: int, of: Tiles
) -> tuple[int, int]:
    """Return the rows and panels of a unit: large blocks, but enough units for all threads."""
    # B is streamed once for each block of rows, so few rows form a single block.
    mb = _rows_of_registers(m, depth, of) if of.operands else _rows_of_block(m, of.mr)
    wanted = units_wanted(threads)
    pb = smaller(panels, _MAX_UNIT_PANELS)
    pb = shared(pb, panels, batch * -(-m // mb), wanted, 1, 1)
    mb = shared(mb, m, batch * -(-panels // pb), wanted, of.mr, of.mr)
    if of.few_rows and threads > 1:
        pb = even_part(panels, pb, batch * -(-m // mb), threads)
    return mb, pb


def _rows_of_registers(m: int, depth: int, of: Tiles) -> int:
    """Return the rows of a block of matrix tiles: half of the L2 cache holds its rows of A."""
    row = round_up(depth, of.depth_step) * of.weight_item
    return smaller(m, larger(caches().l2 // 2 // row // of.mr, 1) * of.mr)


@recorded
def _rows_of_block(m: int, mr: int) -> int:
    return m if m <= _MAX_SINGLE_BLOCK_TILES * mr else _BLOCK_TILES * mr


def _scaled_matrices(product: Product, of: Tiles) -> Callable[[Array], Array]:
    """Return the function from the right operand's array to ``alpha * B`` as ``[S, K, N]``."""
    b, alpha = product.b, product.alpha

    def change(array: Array) -> Array:
        stack = matrices_of(b, array)
        return stack if alpha == 1.0 else stack * np.asarray(alpha, of.dtype)

    return change


def _panels_recipe(product: Product, of: Tiles) -> str:
    b, transposed = product.b, int(is_transposed(product.b))
    return f"{b.rows}x{b.columns} transposed {transposed} x {product.alpha!r} {of.width}/{of.lanes}"


def _right_side(
    low: Lowering, product: Product, of: Tiles, rows: int, steps: Sequence[int]
) -> tuple[Argument, int, list[int]]:
    """Return B, its row stride in bytes (0: packed) and its strides along the batch in elements."""
    b, alpha = product.b, product.alpha
    n, depth = b.columns, b.rows
    size = round_up(depth, of.depth_step) * round_up(n, of.lanes)
    transposed = is_transposed(b)
    matrix_size = max(n * depth, 1)
    matrices = math.prod(b.shape)
    packed_steps = [step // matrix_size * size for step in steps]
    if product.panels is not None:
        return product.panels, 0, packed_steps
    if b.operand.constant:
        recipe = f"gemm panels {_panels_recipe(product, of)} {of.packed_as}"
        weight = low.weight(recipe, matrix_panels(of, _scaled_matrices(product, of)), b.operand)
        return weight, 0, packed_steps
    # If B fits in half of the L1 cache, reading its rows costs no more than reading panels.
    near = of.few_rows and depth * n * of.item <= caches().l1 // 2
    few = not of.operands and (rows <= of.mr or n < of.lanes or near)
    if not transposed and few and alpha == 1.0:
        return b.operand, b.row_step * of.item, list(steps)
    panels = -(-n // of.width)
    item = of.weight_item
    target = low.scratch(matrices * size * item)
    arguments = PackRightArguments(
        source=b.operand,
        target=target,
        depth=depth,
        columns=n,
        row_step=b.row_step * of.item,
        column_step=b.column_step * of.item,
        source_matrix=n * depth * of.item,
        target_matrix=size * item,
        panels=panels,
        factor=alpha,
    )
    units = matrices * panels
    module = "subgraph.ops.matmul.kernels"
    kernel = (
        Kernel(module, "pair_b")
        if of.operands
        else Kernel(module, "pack_b", dtype=of.dtype, lanes=of.lanes, nv=of.nv)
    )
    low.emit(
        kernel,
        arguments,
        units,
        grain=grain(units, 4 * matrices * size),
        bytes=matrices * size * (of.item + item),
    )
    return target, 0, packed_steps

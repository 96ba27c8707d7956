"""Matrix products on OPENCL: register blocks over packed panels on a CPU, local tiles on a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from subgraph.dtypes import FLOATS, compute_dtype
from subgraph.engine.planner.lowering import Unsupported
from subgraph.engine.planner.operands import Argument, Operand
from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.opencl.lowering import ClLowering, cl_lowering, cl_shared
from subgraph.opencl.runtime import ClSource
from subgraph.opencl.tuning import TILES
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.elementwise.cpu import cast_to, emit_cast, temporary, widened
from subgraph.ops.shared.opencl_code import activation, line, number, program, register, require
from subgraph.ops.shared.strides import broadcast_strides

from .products import Matrix, batched, factors_of, is_transposed, matrices_of

Arguments = list["Argument | np.generic[Any]"]
_DEEP = 16  # steps of K whose operands are in local memory at a time: DEEP in kernels.cl
_MIN_SLICE = 32  # least depth of a slice of a product (estimate)
_MAX_SLICES = 32  # most slices of a product (estimate)
_MAX_PARTIAL = 1 << 24  # elements of the sums of all slices: 64 MiB of float32 (estimate)
# Largest tile of float64, so that the sums of a work-item fit in its registers (estimate).
_MAX_WIDE_TILE = 64
# Microseconds of parts of a product on an NVIDIA H100, fitted to 29 products and convolutions of
# networks (benchmarks/opencl.py): the choices by these numbers take 1.05 times as long as the best
# ones, in the geometric mean. On other GPUs, only the ratios between the choices matter. Those of
# _DEEP steps by the size of a tile: of a lone tile, and of a tile where every unit has several.
_STEP_MICROSECONDS = {128: (1.4, 1.4), 64: (0.65, 0.65), 32: (0.6, 0.28)}
_LAUNCH_MICROSECONDS = 7
_MICROSECONDS_PER_MEGABYTE = 0.4  # of results that are read or written, of 4 bytes each


@attrs.define
class Product:
    """``act(alpha * A @ B + beta * bias + R)`` over a stack of matrices; strides in elements.

    Attributes:
        a: Left matrices.
        b: Right matrices.
        out: The results, contiguous.
        sizes: Sizes of the stack, three levels.
        steps: Strides of A, B and the results along the stack.
        alpha: Factor of the product.
        beta: Factor of the bias.
        bias: A matrix, row, column or number that is added; None: none.
        bias_steps: Strides of the bias along rows and columns, 0 where it broadcasts.
        bias_step: Stride of the bias along the innermost level of the stack.
        residual: R, shaped as the results; None: none.
    """

    a: Matrix
    b: Matrix
    out: Operand
    sizes: tuple[int, ...]
    steps: list[tuple[int, ...]]
    alpha: float = 1.0
    beta: float = 1.0
    bias: Operand | None = None
    bias_steps: tuple[int, int] = (0, 0)
    bias_step: int = 0
    residual: Operand | None = None


def lanes_of(low: ClLowering, dtype: str) -> int:
    """Return the elements of a vector in the kernels."""
    return max(2, low.traits.vector // (2 if dtype == "float64" else 1))


def panel_width(low: ClLowering, dtype: str) -> int:
    """Return the columns of a panel."""
    return 2 * lanes_of(low, dtype)


def product_program(low: ClLowering, dtype: str, **macros: str | int) -> ClSource:
    """Return the program of matmul/kernels.cl for a dtype, with further macros."""
    lanes, kind = lanes_of(low, dtype), register(dtype)
    return program("matmul/kernels", LANES=lanes, T=kind, V=f"{kind}{lanes}", **macros)


cl_shared("Einsum")


def cast_optional(low: ClLowering, index: int, dtype: str) -> Operand | None:
    """Return an optional input in the dtype in which kernels compute; None if it is missing.

    Args:
        low: The lowering.
        index: Position of the input.
        dtype: The kernels' dtype.
    """
    operand = low.optional(index)
    return None if operand is None else cast_to(low, operand, dtype)


@cl_lowering("MatMul", "Gemm")
@cl_lowering("FusedMatMul", domain=INTERNAL_DOMAIN)
def matmul(node: Node, low: ClLowering) -> None:
    """Lower MatMul, Gemm, and their fused form with a residual and an activation.

    Raises:
        Unsupported: A dtype or shapes that the kernels cannot handle.
    """
    out = low.output()
    require(low, out.dtype)
    if out.dtype not in FLOATS:
        raise Unsupported(f"{node.op_type} of {out.dtype}")
    if not out.size:
        return
    dtype = compute_dtype(out.dtype)
    x, made = widened(low, low.input(0), out, dtype)
    a, b = factors_of(node, x, cast_to(low, low.input(1), dtype))
    bias, residual = (cast_optional(low, k, dtype) for k in (2, 3))
    alpha, beta = (float(node.attrs.get(name, 1.0)) for name in ("alpha", "beta"))
    a, sizes, steps = batched(a, b)
    product = Product(a, b, made, sizes, steps, alpha, beta, residual=residual)
    if bias is not None and beta != 0.0:
        _add_bias(product, bias)
    emit_product(low, product)
    emit_cast(low, made, out)


def _add_bias(product: Product, bias: Operand) -> None:
    """Set the bias of a product, with strides that broadcast it."""
    rows, columns = product.a.rows, product.b.columns
    single = math.prod(product.sizes) == 1 and bias.size != product.out.size
    if single and bias.rank <= 2 and (bias.rank < 2 or bias.shape[0] in (1, rows)):
        steps = broadcast_strides(bias.shape, (rows, columns))
        product.bias, product.bias_steps = bias, (steps[0], steps[1])
        return
    if bias.size in (1, columns) and (bias.size == 1 or bias.shape[-1] == columns):
        product.bias, product.bias_steps = bias, (0, int(bias.size > 1))
        return
    if bias.size != product.out.size or math.prod(product.sizes) != 1:
        raise Unsupported(f"C of shape {bias.shape} for results of {product.out.shape}")
    product.bias, product.bias_steps = bias, (columns, 1)


def emit_product(low: ClLowering, product: Product) -> None:
    """Launch a product.

    Raises:
        Unsupported: Columns of A and rows of B differ.
    """
    a, b = product.a, product.b
    if a.columns != b.rows:
        raise Unsupported(f"a product of depths {a.columns} and {b.rows}")
    if low.traits.is_gpu:
        launch_tiles(low, product, product.b.operand, [b.row_step, b.column_step])
    else:
        word, steps = _packed(low, product)
        launch_panels(low, product, word, steps)


def defines_of(low: ClLowering, product: Product) -> tuple[dict[str, str | int], float, float]:
    """Return macro definitions of activation, bias and residual, and the activation's p and q."""
    (name, text), p, q = activation(low.node)
    flags: dict[str, str | int] = {
        name: text,
        "BIAS": int(product.bias is not None),
        "RESIDUAL": int(product.residual is not None),
    }
    return flags, p, q


def arguments(
    product: Product, right: Argument, right_steps: Sequence[int], numbers: tuple[float, float]
) -> Arguments:
    """Return the arguments that the CPU's and the GPU's kernel share.

    Args:
        product: The product.
        right: B, in the form that the kernel reads.
        right_steps: Strides of B along the stack, in elements.
        numbers: The activation's p and q.
    """
    a, out, dtype = product.a, product.out, product.out.dtype
    words: Arguments = [a.operand, right, out, product.bias or out, product.residual or out]
    words += [a.rows, product.b.columns, a.columns, a.row_step, a.column_step]
    words += product.bias_steps
    words += [number(dtype, v) for v in (product.alpha, product.beta, *numbers)]
    words += [*product.sizes[1:], *product.steps[0], *right_steps, *product.steps[2]]
    words.append(product.bias_step)
    return words


def _cost(product: Product) -> dict[str, int]:
    stack = math.prod(product.sizes)
    m, n, k = product.a.rows, product.b.columns, product.a.columns
    moved = product.a.operand.nbytes + stack * n * k * 4 + product.out.nbytes
    return {"flops": 2 * stack * m * n * k, "bytes": moved}


def launch_panels(
    low: ClLowering, product: Product, right: Argument, right_steps: Sequence[int]
) -> None:
    """Launch the CPU's kernel over packed panels of B.

    Args:
        low: Collects the plan's launches.
        product: The product.
        right: B in panels (`pack_panels`).
        right_steps: Elements between packed matrices along the stack.
    """
    flags, p, q = defines_of(low, product)
    tuning = low.tuning
    dtype, rows = product.out.dtype, product.a.rows
    block = tuning.rows if rows > 4 else max(rows, 1)
    panels = -(-product.b.columns // panel_width(low, dtype))
    stack = math.prod(product.sizes)
    lines = -(-rows // block)
    # Enough work-items for all compute units, each with as many row blocks as the caches hold.
    blocks = max(1, min(tuning.blocks, lines * panels * stack // (4 * low.traits.units), lines))
    blocks = -(-lines // -(-lines // blocks))
    source = product_program(
        low,
        dtype,
        ROWS=block,
        BLOCKS=tuning.blocks,
        CHUNK=tuning.chunk,
        DENSE=int(product.a.column_step == 1),
        **flags,
    )
    words = [*arguments(product, right, right_steps, (p, q)), blocks]
    size = (-(-lines // blocks), panels, stack)
    low.launch(source, "panels", words, size, (1, 1, 1), **_cost(product))


@attrs.frozen
class Tiling:
    """The way in which a GPU divides a product.

    Attributes:
        tile: Rows and columns of the part of C that a work-group computes.
        slices: Parts of the depth that are summed by different work-groups.
    """

    tile: int
    slices: int = 1

    @property
    def group(self) -> int:
        """Work-items along each side of a tile."""
        return 8 if self.tile < 64 else 16


def choose_tiling(low: ClLowering, product: Product) -> Tiling:
    """Return the tiling of a product with the least estimated time."""
    depth, count = product.a.columns, product.out.size
    most = low.traits.max_group
    tiles = [t for t in TILES if t <= low.tuning.tile and Tiling(t).group ** 2 <= most]
    tiles = tiles or [TILES[-1]]
    if product.out.dtype == "float64":
        tiles = [tile for tile in tiles if tile <= _MAX_WIDE_TILE] or tiles[-1:]
    slices = [1]
    while (
        slices[-1] < _MAX_SLICES
        and depth >= 2 * slices[-1] * _MIN_SLICE
        and 2 * slices[-1] * count <= _MAX_PARTIAL
    ):
        slices.append(2 * slices[-1])
    choices = [Tiling(tile, number) for tile in tiles for number in slices]
    return min(choices, key=lambda choice: _estimate(low, product, choice))


def _estimate(low: ClLowering, product: Product, choice: Tiling) -> float:
    """Return the microseconds that a product takes on an NVIDIA H100."""
    rows, columns = product.a.rows, product.b.columns
    groups = -(-rows // choice.tile) * -(-columns // choice.tile) * math.prod(product.sizes)
    steps = -(-product.a.columns // (_DEEP * choice.slices))
    alone, together = _STEP_MICROSECONDS[choice.tile]
    work = steps * max(alone, together * groups * choice.slices / low.traits.units)
    megabytes = 4e-6 * product.out.size * choice.slices
    launches, moved = (1, megabytes) if choice.slices == 1 else (2, 2 * megabytes)
    return _LAUNCH_MICROSECONDS * launches + work + _MICROSECONDS_PER_MEGABYTE * moved


def launch_tiles(
    low: ClLowering,
    product: Product,
    right: Argument,
    more: Sequence[int],
    **defines: str | int,
) -> None:
    """Launch the GPU's kernel over tiles in local memory.

    Args:
        low: Collects the plan's launches.
        product: The product.
        right: B, or the image of a convolution.
        more: Further arguments: strides of B's rows and columns, or the sizes of the convolution.
        **defines: Further macro definitions: KD, KH and KW, the taps of a convolution.
    """
    flags, p, q = defines_of(low, product)
    out, depth = product.out, product.a.columns
    tiling = choose_tiling(low, product)
    stack = math.prod(product.sizes)
    share = -(-depth // (tiling.slices * _DEEP)) * _DEEP
    slices = max(1, -(-depth // max(share, 1)))
    source = product_program(
        low,
        out.dtype,
        TILE=tiling.tile,
        GROUP=tiling.group,
        LEFT_ALONG=int(product.a.column_step == 1),
        RIGHT_ALONG=int(not defines and is_transposed(product.b)),
        SPLIT=int(slices > 1),
        **flags,
        **defines,
    )
    across, down = (-(-n // tiling.tile) for n in (product.b.columns, product.a.rows))
    size = (across * down * stack * slices * tiling.group, tiling.group)
    target = out if slices == 1 else temporary(low, out.dtype, (slices * out.size,))
    words = arguments(product, right, product.steps[1], (p, q))
    words[2] = target
    words += [stack, share, *more]
    group = (tiling.group, tiling.group)
    low.launch(source, "tiles", words, size, group, **_cost(product))
    if slices > 1:
        words = [target, out, product.bias or out, product.residual or out]
        words += [slices, out.size, product.a.rows, product.b.columns, *product.bias_steps]
        words += [number(out.dtype, v) for v in (product.alpha, product.beta, p, q)]
        words += [product.sizes[2], product.bias_step]
        moved = target.nbytes + out.nbytes
        low.launch(source, "total", words, *line(low, out.size), bytes=moved)


def _packed(low: ClLowering, product: Product) -> tuple[Argument, list[int]]:
    """Return B in panels, packed once if it is a weight, and its strides along the stack."""
    b, dtype = product.b, product.out.dtype
    width = panel_width(low, dtype)
    depth, n = b.rows, b.columns
    panels = -(-n // width)
    packed = panels * depth * width
    matrices = math.prod(b.shape)
    steps = [step // max(depth * n, 1) * packed for step in product.steps[1]]
    if b.operand.constant:
        recipe = f"opencl panels {depth}x{n} transposed {int(is_transposed(b))} of {width}"

        def make(array: Array) -> Array:
            return pack_panels(matrices_of(b, array), width)

        return low.weight(recipe, make, b.operand), steps
    target = temporary(low, dtype, (matrices * packed,))
    words: Arguments = [b.operand, target, depth, n, b.row_step, b.column_step]
    words += [panels, depth * n, packed]
    source = product_program(low, dtype, PACK=1, **{"ACT(x, p, q)": "x"}, BIAS=0, RESIDUAL=0)
    moved = 2 * matrices * packed * 4
    low.launch(source, "pack", words, (panels, matrices), (1, 1), bytes=moved)
    return target, steps


def pack_panels(stack: Array, width: int) -> Array:
    """Pack matrices ``[S, K, N]`` into panels ``[S, N / width, K, width]``, zero beyond N."""
    count, depth, n = stack.shape
    panels = -(-n // width)
    whole = np.zeros((count, depth, panels * width), stack.dtype)
    whole[:, :, :n] = stack
    return np.ascontiguousarray(whole.reshape(count, depth, panels, width).swapaxes(1, 2))

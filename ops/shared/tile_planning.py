"""Contraction tiles, activations and the division of work, shared by lowerings over tiles."""

from __future__ import annotations

import math
from typing import Any

import attrs

from subgraph.engine.codegen.tiling import (
    F_HI,
    F_LO,
    FEW_ROWS,
    MATRIX_DEPTH,
    MATRIX_TILE,
    tile_shape,
)
from subgraph.engine.planner.constants import half_storage
from subgraph.engine.planner.lowering import Lowering, Unsupported
from subgraph.engine.planner.operands import Operand
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.graph.symbolic import recorded
from subgraph.system import host

from .activations import ACTIVATIONS, stated_activation

FLOATS = ("float32", "float64")
# Vector registers of x86 without 512-bit vectors (hardware figure).
_REGISTERS_OF_HALF_VECTORS = 16
# Rows up to which reading weights in half precision saves more time than it takes to widen them
# (measured with AVX-512: 0.2 to 0.9 of the time for a row, 1.0 to 1.2 from 8 rows on).
_FEW_ROWS_OF_WEIGHTS = 4
_MIN_PRODUCTS_PER_THREAD = 200_000  # multiplications; starting a thread takes as long (estimate)
_UNITS_PER_THREAD = 4  # work units for each of several threads, which balance their ends (estimate)


@attrs.frozen
class Tiles:
    """The contraction tile of a dtype on this machine, and the kernels made of it.

    Attributes:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Elements of a vector.
        mr: Most rows of a tile.
        nv: Most vectors of a tile's row.
        weights: ``"bfloat16"`` or ``"float16"`` if packed weights are stored so; "" if as
            ``dtype``.
        operands: ``"bfloat16"`` for matrix tiles, which multiply numbers of bfloat16 and add them
            in ``dtype`` (`subgraph.engine.codegen.matrix_tile`); "" for tiles of ``dtype``.
        squares: Whether contraction tiles sum squares of differences instead of products.
    """

    dtype: str
    lanes: int
    mr: int
    nv: int
    weights: str = ""
    operands: str = ""
    squares: bool = False

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return 4 if self.dtype == "float32" else 8

    @property
    def weight_item(self) -> int:
        """Bytes of an element of packed weights."""
        return 2 if self.weights or self.operands else self.item

    @property
    def packed_as(self) -> str:
        """The dtype and order of packed weights as text, for keys of the weight cache."""
        return "bfloat16 pairs" if self.operands else self.weights

    @property
    def depth_step(self) -> int:
        """Steps along K that a tile takes at a time; operands are padded to a multiple of them."""
        return MATRIX_DEPTH if self.operands else 1

    @property
    def width(self) -> int:
        """Columns of a panel."""
        return self.nv * self.lanes

    @property
    def few_rows(self) -> bool:
        """Whether these are few-row tiles: each loaded weight serves few rows; strips use them."""
        return self.mr <= FEW_ROWS

    @property
    def variant(self) -> dict[str, str | int]:
        """The arguments of the factories of kernels over these tiles."""
        shape: dict[str, str | int] = {
            "dtype": self.dtype,
            "lanes": self.lanes,
            "mr": self.mr,
            "nv": self.nv,
        }
        forms = {"weights": self.weights, "operands": self.operands}
        return shape | {name: form for name, form in forms.items() if form}

    def contraction(self, masked: bool = False, ahead: bool = False, runs: bool = False) -> Kernel:
        """Return the contraction tile.

        Args:
            masked: The last vector of a row is partial.
            ahead: It prefetches weights (few-row tiles only).
            runs: Its rows may be of several runs of A (dot products of pairs of bfloat16 only).
        """
        if self.operands:
            of_runs: dict[str, bool] = {"runs": True} if runs else {}
            return Kernel(
                "subgraph.engine.codegen.matrix_tile", "contraction", masked=masked, **of_runs,
                **self.variant,
            )  # fmt: skip
        # Many-row tiles were tuned without prefetching.
        extra: dict[str, bool] = {"ahead": True} if ahead and self.few_rows else {}
        if self.squares:
            extra["squares"] = True
        return Kernel(
            "subgraph.engine.codegen.tile", "contraction", masked=masked, **extra, **self.variant
        )

    def panel(self, across: bool) -> Kernel:
        """Return the panel kernel; A has contiguous rows (``across``) or contiguous steps."""
        return Kernel("subgraph.engine.codegen.panel", "panel", across=across, **self.variant)

    def strip(self, step: int, steps: int, ahead: bool = False) -> Kernel:
        """Return the strip kernel.

        Args:
            step: Elements from a row of A to the next one.
            steps: Products of a round.
            ahead: It prefetches weights.
        """
        extra: dict[str, bool] = {"ahead": True} if ahead else {}
        return Kernel(
            "subgraph.engine.codegen.strip",
            "strip",
            step=step,
            steps=steps,
            **extra,
            **self.variant,
        )

    def depthwise(self) -> Kernel:
        """Return the depthwise tile."""
        return Kernel(
            "subgraph.engine.codegen.tile",
            "depthwise",
            dtype=self.dtype,
            lanes=self.lanes,
            mr=self.mr,
            masked=False,
        )

    def has_windows(self, taps: int, step: int) -> bool:
        """Return whether `windows` has a kernel, which keeps a row of weights in registers."""
        return taps in (3, 5, 7) and step in (1, 2) and self.lanes > 1

    def window_rows(self, taps: int) -> int:
        """Return the most pixels of a tile of windows that fit in registers beside the weights."""
        return 8 if taps < 7 else 7

    def windows(
        self, taps: int, step: int, group: int = 1, storage: str = "", source: str = ""
    ) -> Kernel:
        """Return the kernel of rows of windows.

        Args:
            taps: Taps of a window along the width.
            step: Pixels from a window to the next one.
            group: Channels of a group.
            storage: ``"bfloat16"`` if results are stored so.
            source: ``"bfloat16"`` if pixels are stored so.
        """
        extra: dict[str, int | str] = {"group": group} if group > 1 else {}
        extra |= {"storage": storage} if storage else {}
        extra |= {"source": source} if source else {}
        return Kernel(
            "subgraph.engine.codegen.strip",
            "windows",
            dtype=self.dtype,
            lanes=self.lanes,
            mr=self.window_rows(taps),
            taps=taps,
            step=step,
            **extra,
        )


def tiles(dtype: str, lanes: int = 0) -> Tiles:
    """Return the tiles of a dtype.

    Args:
        dtype: The dtype.
        lanes: Elements of a vector; 0: those of this machine's vectors.

    Raises:
        Unsupported: The dtype is neither float32 nor float64.
    """
    if dtype not in FLOATS:
        raise Unsupported(f"dtype {dtype}; float32 and float64 have kernels")
    whole = host.lanes(dtype)
    # Half vectors have the tiles, and the instruction encoding, of machines with such vectors.
    registers = host.isa().registers if lanes in (0, whole) else _REGISTERS_OF_HALF_VECTORS
    lanes = lanes or whole
    return Tiles(dtype, lanes, *tile_shape(lanes, registers))


def direct_tiles(dtype: str, lanes: int = 0) -> Tiles:
    """Return the tiles of direct convolutions and matrix products.

    With 512-bit vectors these are few-row tiles, of which convolutions make strips, and which
    prefetch their next weights.

    Args:
        dtype: The dtype.
        lanes: Elements of a vector; 0: those of this machine's vectors.

    Raises:
        Unsupported: The dtype is neither float32 nor float64.
    """
    of = tiles(dtype, lanes)
    return attrs.evolve(of, mr=min(of.mr, FEW_ROWS)) if host.has_512_bit_vectors() else of


def weight_tiles(of: Tiles, low: Lowering, weight: Operand, rows: int | None = None) -> Tiles:
    """Return the tiles for a product with ``weight``, and in which dtype they store it.

    This is bfloat16 if options ask for it. For few rows, whose time is that of reading weights, it
    is the half precision of the model, which holds them exactly.

    Args:
        of: The contraction tiles.
        low: The lowering, with the option ``WEIGHTS_PRECISION``.
        weight: The weight; only constant float32 ones are narrowed.
        rows: Least number of rows that are multiplied by the weight; None: many.
    """
    if of.dtype != "float32" or not weight.constant:
        return of
    if low.options.get("WEIGHTS_PRECISION") == "bfloat16":
        return attrs.evolve(of, weights="bfloat16")
    few = rows is not None and rows <= _FEW_ROWS_OF_WEIGHTS
    half = half_storage(weight) if few else ""
    if half == "float16" and not host.widens_float16():
        return of
    return attrs.evolve(of, weights=half)


def product_tiles(of: Tiles, low: Lowering, weight: Operand, rows: int | None = None) -> Tiles:
    """Return the tiles for a product with ``weight``: matrix tiles if options allow bfloat16.

    Args:
        of: The contraction tiles of float32.
        low: The lowering, with the options ``INFERENCE_PRECISION`` and ``WEIGHTS_PRECISION``.
        weight: The right operand; only constant ones have matrix tiles.
        rows: Least number of rows that are multiplied by the weight; None: many.
    """
    matrix = matrix_tiles(low, of.dtype) if weight.constant else None
    return weight_tiles(of, low, weight, rows) if matrix is None else matrix


def matrix_tiles(low: Lowering, dtype: str) -> Tiles | None:
    """Return the matrix tiles of bfloat16; None if options do not allow them.

    Args:
        low: The lowering, with the option ``INFERENCE_PRECISION``.
        dtype: Dtype of the operands and results.
    """
    allowed = low.options.get("INFERENCE_PRECISION") == "bfloat16" and dtype == "float32"
    if not allowed or not host.multiplies_bfloat16():
        return None
    return Tiles("float32", host.lanes("float32"), *MATRIX_TILE, operands="bfloat16")


@attrs.frozen
class Activation:
    """An activation, as arguments of kernels over tiles.

    Attributes:
        kernel: Kernel that runs over a finished tile, 0: none.
        flags: ``F_*`` flags of the tile.
        low: Lower bound, or first parameter of ``kernel``.
        high: Upper bound, or second parameter of ``kernel``.
        keeps_zero: The activation of 0 is 0.
    """

    kernel: Kernel | int
    flags: int
    low: float
    high: float
    keeps_zero: bool = True

    def arguments(self, *, rounds: bool = False) -> dict[str, Any]:
        """Return the fields with which kernels over tiles are called.

        Args:
            rounds: Whether the kernel stores its results in bfloat16.
        """
        kernel = self.kernel
        if rounds and isinstance(kernel, Kernel):
            options = {**dict(kernel.variant), "storage": "bfloat16"}
            kernel = Kernel(kernel.module, kernel.factory, **options)
        return {
            "activation": kernel,
            "flags": self.flags,
            "low": self.low,
            "high": self.high,
        }


NO_ACTIVATION = Activation(0, 0, 0.0, 0.0)


def activation(node: Node, of: Tiles, low: Lowering) -> Activation:
    """Return the activation that a fused node's attributes name (none for a plain node).

    Args:
        node: The node.
        of: The tiles that it follows.
        low: The node's lowering, with the option ``INFERENCE_PRECISION``.
    """
    name, lower, upper = stated_activation(node)
    if not name:
        return NO_ACTIVATION
    if name == "Relu":
        return Activation(0, F_LO, 0.0, 0.0)
    if name == "Clip":
        flags = (F_LO if lower > -math.inf else 0) | (F_HI if upper < math.inf else 0)
        return Activation(0, flags, lower, upper, lower <= 0.0 <= upper)
    kernel = Kernel(
        "subgraph.ops.shared.activation_kernels",
        "activation",
        dtype=of.dtype,
        lanes=of.lanes,
        act=name,
        **({} if matrix_tiles(low, of.dtype) is None else {"rounded": "bfloat16"}),
    )
    return Activation(kernel, 0, lower, upper, ACTIVATIONS[name].keeps_zero)


def round_up(value: int, step: int) -> int:
    """Return the smallest multiple of ``step`` that is at least ``value``."""
    return -(-value // step) * step


@recorded
def even_part(total: int, part: int, others: int, threads: int) -> int:
    """Return a size of parts, at most ``part``, with which each thread gets as many units.

    Args:
        total: Size that is divided into parts.
        part: The largest size of a part.
        others: Units for each part.
        threads: Threads that share the units.

    Returns:
        The largest such size; the largest number of equal parts if none was found.
    """
    least = -(-total // part)
    # With 16 units per thread, an unequal division costs little.
    for pieces in range(least, min(2 * least, 16 * threads) + 1):
        size = -(-total // pieces)
        if -(-total // size) * others % threads == 0:
            return size
    return -(-total // least)


@recorded
def grain(units: int, flops: int) -> int:
    """Return the least units that a thread takes; 0: the step runs on one thread.

    Args:
        units: Work units of the step.
        flops: Its cost in multiplications.
    """
    if flops < 2 * _MIN_PRODUCTS_PER_THREAD or units < 2:
        return 0
    return max(1, math.ceil(units * _MIN_PRODUCTS_PER_THREAD / flops))


def units_wanted(threads: int) -> int:
    """Return into how many work units a step is divided, if it has enough work; see `shared`."""
    return _UNITS_PER_THREAD * threads if threads > 1 else 1


@recorded
def shared(part: int, total: int, others: int, wanted: int, least: int, multiple: int) -> int:
    """Return the size of parts, halved until there are enough units.

    Args:
        part: Size of a part at first.
        total: Size that is divided into parts.
        others: Units for each part.
        wanted: Units that are enough.
        least: Least size of a part.
        multiple: Halves are rounded up to multiples of it.
    """
    while others * -(-total // part) < wanted and part > least:
        part = max(least, round_up(-(-part // 2), multiple))
    return part


@recorded
def halved(
    count: int, least: int, multiple: int, each: int, step: int, rest: int, most: int
) -> int:
    """Return a count of rows or columns, halved until they read at most ``most`` bytes.

    They read ``each * (step * count + rest)`` bytes.

    Args:
        count: The count at first.
        least: Least count.
        multiple: Halves are rounded up to multiples of it.
        each: Bytes of an input row or column.
        step: Input rows or columns from one output to the next.
        rest: Input rows or columns of a window beyond ``step``.
        most: Bytes that may be read.
    """
    while count > least and each * (step * count + rest) > most:
        count = round_up(-(-count // 2), multiple)
    return count

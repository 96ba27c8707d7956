"""What lowerings onto contraction tiles share: tile sizes, activations, grains."""

from __future__ import annotations

import math

import attrs

from subgraph.engine.codegen.tiling import F_HI, F_LO, LOW_ROWS, tile_shape
from subgraph.engine.planner.lowering import Lowering, Operand, Unsupported
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.graph.symbolic import recorded
from subgraph.system import host

FLOATS = ("float32", "float64")
_NOT_ZERO_AT_ZERO = frozenset({"Sigmoid", "Softplus", "HardSigmoid"})
_REGISTERS_OF_HALVES = 16
SMALL = 200_000  # multiplications that are not worth a second thread


@attrs.frozen
class Tiles:
    """The contraction tile of a dtype on this machine.

    Attributes:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Elements of a vector.
        mr: Most rows of a tile.
        nv: Most vectors of a row.
        weights: ``"bfloat16"`` where packed weights are held in it, else empty.
    """

    dtype: str
    lanes: int
    mr: int
    nv: int
    weights: str = ""

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return 4 if self.dtype == "float32" else 8

    @property
    def weight_item(self) -> int:
        """Bytes of an element of packed weights."""
        return 2 if self.weights else self.item

    @property
    def width(self) -> int:
        """Columns of a panel."""
        return self.nv * self.lanes

    @property
    def low(self) -> bool:
        """Whether tiles are low: each weight serves few rows, and strips are made of them."""
        return self.mr <= LOW_ROWS

    @property
    def variant(self) -> dict[str, str | int]:
        """What kernels over these tiles are called with."""
        shape: dict[str, str | int] = {
            "dtype": self.dtype,
            "lanes": self.lanes,
            "mr": self.mr,
            "nv": self.nv,
        }
        return shape | ({"weights": self.weights} if self.weights else {})

    def contraction(
        self,
        masked: bool = False,
        ahead: bool = False,
        twice: bool = False,
        mixed: bool = False,
    ) -> Kernel:
        """Return the contraction tile.

        Args:
            masked: The last vector of a row is not whole.
            ahead: Of low tiles the one that prefetches.
            twice: The one that adds its sums to two results.
            mixed: The one whose B is the sum of two.
        """
        # High tiles were tuned without it.
        extra: dict[str, bool] = {"ahead": True} if ahead and self.low else {}
        extra |= {"twice": True} if twice else {}
        extra |= {"mixed": True} if mixed else {}
        return Kernel(
            "subgraph.engine.codegen.tile", "contraction", masked=masked, **extra, **self.variant
        )

    def panel(self, across: bool) -> Kernel:
        """Return the panel whose A has adjacent rows (``across``) or steps."""
        return Kernel("subgraph.engine.codegen.panel", "panel", across=across, **self.variant)

    def strip(self, step: int, steps: int, ahead: bool = False) -> Kernel:
        """Return the strip of rows ``step`` elements apart and rounds of ``steps`` products.

        ``ahead``: the one that prefetches.
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
        """Return whether there are rows of windows: the weights of a row stay in registers."""
        return taps in (3, 5, 7) and step in (1, 2) and self.lanes > 1

    def window_rows(self, taps: int) -> int:
        """Return the most pixels of a tile of windows: they fit in registers beside the weights."""
        return 8 if taps < 7 else 7

    def windows(self, taps: int, step: int, group: int = 1) -> Kernel:
        """Return the row of windows of so many taps, a distance apart, over groups of channels."""
        extra = {"group": group} if group > 1 else {}
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
        lanes: Elements of a vector; 0: as many as it holds on this machine.

    Raises:
        Unsupported: There are none.
    """
    if dtype not in FLOATS:
        raise Unsupported(f"dtype {dtype}; float32 and float64 have kernels")
    whole = host.lanes(dtype)
    # Halves of vectors have the tiles, and the encoding, of machines whose vectors they are.
    registers = host.isa().registers if lanes in (0, whole) else _REGISTERS_OF_HALVES
    lanes = lanes or whole
    return Tiles(dtype, lanes, *tile_shape(lanes, registers))


def direct_tiles(dtype: str, lanes: int = 0) -> Tiles:
    """Return the tiles of direct convolutions and matrix products, low ones on x86.

    The sums of the former run in strips, and both bring what comes next closer meanwhile.

    Args:
        dtype: The dtype.
        lanes: Elements of a vector; 0: as many as it holds on this machine.

    Raises:
        Unsupported: There are none.
    """
    of = tiles(dtype, lanes)
    return attrs.evolve(of, mr=min(of.mr, LOW_ROWS)) if host.has_512_bit_vectors() else of


def weight_tiles(of: Tiles, low: Lowering, weight: Operand) -> Tiles:
    """Return the tiles for a product with ``weight``: weights in bfloat16 where that is asked."""
    asked = low.options.get("WEIGHTS_PRECISION") == "bfloat16"
    if not asked or of.dtype != "float32" or not weight.constant:
        return of
    return attrs.evolve(of, weights="bfloat16")


@attrs.frozen
class Activation:
    """The words of an activation: post kernel, flags and the two numbers.

    Attributes:
        post: What runs after a tile, 0 for nothing.
        flags: ``F_*`` bits of the tile.
        low: Lower bound or first parameter.
        high: Upper bound or second parameter.
        keeps_zero: It is 0 at 0.
    """

    post: Kernel | int
    flags: int
    low: float
    high: float
    keeps_zero: bool = True


def activation(node: Node, of: Tiles) -> Activation:
    """Return the activation that a fused node's attributes name (none for a plain node)."""
    name = str(node.attrs.get("activation", ""))
    low = float(node.attrs.get("activation_alpha", 0.0))
    high = float(node.attrs.get("activation_beta", 0.0))
    if not name:
        return Activation(0, 0, 0.0, 0.0)
    if name == "Relu":
        return Activation(0, F_LO, 0.0, 0.0)
    if name == "Clip":
        flags = (F_LO if low > -math.inf else 0) | (F_HI if high < math.inf else 0)
        return Activation(0, flags, low, high, low <= 0.0 <= high)
    kernel = Kernel(
        "subgraph.ops.shared.epilogue_kernels", "post", dtype=of.dtype, lanes=of.lanes, act=name
    )
    return Activation(kernel, 0, low, high, name not in _NOT_ZERO_AT_ZERO)


def round_up(value: int, step: int) -> int:
    """Return the smallest multiple of ``step`` that is at least ``value``."""
    return -(-value // step) * step


@recorded
def even_part(total: int, part: int, others: int, threads: int) -> int:
    """Return the size of equal parts, ``part`` or less, of which all threads get as many.

    Args:
        total: What is cut.
        part: The largest part.
        others: Units that there are for each part.
        threads: Threads that share the units.
    """
    least = -(-total // part)
    # With many units, one more or less is no matter.
    for pieces in range(least, min(2 * least, 16 * threads) + 1):
        size = -(-total // pieces)
        if -(-total // size) * others % threads == 0:
            return size
    return -(-total // least)


@recorded
def grain(units: int, flops: int) -> int:
    """Return the least units that are worth a thread, 0 for a step that stays on one."""
    if flops < 2 * SMALL or units < 2:
        return 0
    return max(1, math.ceil(units * SMALL / flops))


@recorded
def shared(part: int, total: int, others: int, wanted: int, least: int, multiple: int) -> int:
    """Halve parts, to multiples, until there are so many units.

    Args:
        part: What is halved.
        total: What is cut into parts.
        others: Units that there are for each part.
        wanted: The units wanted.
        least: Parts are not halved from here on.
        multiple: What halves are rounded up to.
    """
    while others * -(-total // part) < wanted and part > least:
        part = max(least, round_up(-(-part // 2), multiple))
    return part


@recorded
def halved(
    count: int, least: int, multiple: int, each: int, step: int, rest: int, most: int
) -> int:
    """Halve a count, to multiples, until it reads no more than ``most`` bytes.

    Args:
        count: What is halved.
        least: It is not halved from here on.
        multiple: What halves are rounded up to.
        each: Bytes of ``step * count + rest``.
        step: How many there are for each.
        rest: How many there are besides.
        most: The bytes that may be read.
    """
    while count > least and each * (step * count + rest) > most:
        count = round_up(-(-count // 2), multiple)
    return count

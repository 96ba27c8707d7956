"""DeformConv, Col2Im and AffineGrid on OPENCL: the CPU's shape work, other kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from subgraph.engine.planner.lowering import Operand, Word
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.opencl.lowering import ClLowering, cl_kernel, cl_shared
from subgraph.opencl.runtime import ClSource
from subgraph.ops.shared.opencl_code import line, register, require

cl_shared("AffineGrid", "Col2Im", "DeformConv")


def _program(low: ClLowering, kernel: Kernel, **defines: int) -> ClSource:
    variant: dict[str, Any] = dict(kernel.variant)
    require(low, variant["dtype"])
    held: dict[str, str | int] = {"T": register(variant["dtype"]), **defines}
    return ClSource("unfold/kernels", defines=tuple(sorted(held.items())))


@cl_kernel("subgraph.ops.unfold.kernels", "deform_columns")
def deform_columns(low: ClLowering, kernel: Kernel, words: Sequence[Word]) -> None:
    """Launch the samples of DeformConv."""
    x, offsets, mask, columns, *numbers = words
    assert isinstance(columns, Operand)
    source = _program(low, kernel, DEFORM=1, MASKED=int(isinstance(mask, Operand)))
    arguments = [columns.size, x, offsets, mask or x, columns, *numbers]
    low.launch(source, "deform_columns", arguments, *line(low, columns.size))


@cl_kernel("subgraph.ops.unfold.kernels", "columns_to_image")
def columns_to_image(low: ClLowering, kernel: Kernel, words: Sequence[Word]) -> None:
    """Launch the sums of Col2Im, which has no bias."""
    y = words[1]
    assert isinstance(y, Operand)
    source = _program(low, kernel, COLUMNS=1)
    low.launch(source, "columns_to_image", [y.size, *words[:20]], *line(low, y.size))

"""RoiAlign, MaxRoiPool and GridSample on OPENCL: the CPU's shape work, other kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.engine.planner.lowering import Operand, Word
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.opencl.lowering import ClLowering, cl_kernel, cl_shared
from subgraph.opencl.runtime import ClSource, definitions
from subgraph.ops.shared.opencl_code import line, number, register, require

cl_shared("RoiAlign", "MaxRoiPool", "GridSample")
_TAPS = {"nearest": 1, "linear": 2, "cubic": 4}
_PADDINGS = {"zeros": 0, "border": 1, "reflection": 2}


def _numbers(dtype: str, words: Sequence[Word]) -> list[Word | np.generic[Any]]:
    """Return words with floats as arguments of the dtype."""
    return [number(dtype, word) if isinstance(word, float) else word for word in words]


@cl_kernel("subgraph.ops.image.roi_kernels", "roi_average", "roi_largest")
def roi_align(low: ClLowering, kernel: Kernel, words: Sequence[Word]) -> None:
    """Launch RoiAlign."""
    variant: dict[str, Any] = dict(kernel.variant)
    dtype, y = variant["dtype"], words[3]
    require(low, dtype)
    assert isinstance(y, Operand)
    flags = {"HALF": int(bool(words[12])), "LARGEST": int(kernel.factory == "roi_largest")}
    source = ClSource(
        "image/sampling", defines=definitions({"ROI": 1, "T": register(dtype), **flags})
    )
    low.launch(source, "roi_align", [y.size, *_numbers(dtype, words[:12])], *line(low, y.size))


@cl_kernel("subgraph.ops.image.roi_kernels", "few_samples")
def few_samples(low: ClLowering, kernel: Kernel, words: Sequence[Word]) -> None:
    """Launch the check of RoiAlign's samples."""
    dtype = str(dict(kernel.variant)["dtype"])
    require(low, dtype)
    flags = {"HALF": int(bool(words[5])), "LARGEST": 0}
    source = ClSource(
        "image/sampling", defines=definitions({"ROI": 1, "T": register(dtype), **flags})
    )
    low.launch(source, "few_samples", _numbers(dtype, [*words[:5], words[6]]), (1,))


@cl_kernel("subgraph.ops.image.roi_kernels", "max_roi_pool")
def max_roi_pool(low: ClLowering, kernel: Kernel, words: Sequence[Word]) -> None:
    """Launch MaxRoiPool."""
    dtype, y = str(dict(kernel.variant)["dtype"]), words[2]
    require(low, dtype)
    assert isinstance(y, Operand)
    flags = {"HALF": 0, "LARGEST": 0}
    source = ClSource(
        "image/sampling", defines=definitions({"ROI": 1, "T": register(dtype), **flags})
    )
    low.launch(source, "max_roi_pool", [y.size, *_numbers(dtype, words)], *line(low, y.size))


@cl_kernel("subgraph.ops.image.sampling_kernels", "grid_sample")
def grid_sample(low: ClLowering, kernel: Kernel, words: Sequence[Word]) -> None:
    """Launch GridSample."""
    variant: dict[str, Any] = dict(kernel.variant)
    require(low, variant["dtype"], variant["grid"])
    grid, rank = words[1], words[7]
    assert isinstance(grid, Operand)
    assert isinstance(rank, int)
    defines: dict[str, str | int] = {
        "T": register(variant["dtype"]),
        "U": register(variant["grid"]),
        "TAPS": _TAPS[variant["mode"]],
        "PADDING": _PADDINGS[variant["padding"]],
        "CORNERS": int(variant["corners"]),
    }
    count = grid.size // rank
    source = ClSource("image/sampling", defines=definitions(defines))
    low.launch(source, "grid_sample", [count, *words[:9]], *line(low, count))

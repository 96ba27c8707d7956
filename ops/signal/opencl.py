"""DFT and STFT on OPENCL: the lowerings of the CPU, another kernel.

It computes in double precision if the device has it, else in the dtype of the input.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from subgraph.engine.planner.operands import Weight
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.opencl.lowering import ClLowering, cl_kernel, cl_shared
from subgraph.ops.elementwise.cpu import temporary
from subgraph.ops.shared.opencl_code import program, register, require, variant_of

from .arguments import LinesArguments

cl_shared("DFT", "STFT")
_GROUP_SIZE = 128  # work-items of a GPU's work-group, which share a line; an estimate


@cl_kernel("subgraph.ops.signal.kernels", "lines")
def lines(low: ClLowering, kernel: Kernel, a: LinesArguments) -> None:
    """Launch the transformation of lines."""
    dtype = variant_of(kernel)["dtype"]
    require(low, dtype)
    units = a.y.size // (a.results * a.y_numbers)
    work = "float64" if low.traits.fp64 else dtype
    circle = Weight(f"in {work}", partial(np.asarray, dtype=work), (a.table,))
    factors = low.weight("factors", np.array, np.array(a.factors or [1], np.int32))
    buffers = temporary(low, work, (units * 4 * a.size,))
    group = _GROUP_SIZE if low.traits.is_gpu else 1
    windowed = not isinstance(a.window, int)
    macros = {"T": register(dtype), "W": register(work)}
    operands = [a.x, a.y, a.window if windowed else a.x, circle, factors, buffers]
    sizes = [a.factor_count, a.samples, a.size, a.results, a.x_numbers, a.y_numbers]
    steps = [a.x_step, a.y_step, a.lines, a.x_outer, a.y_outer, a.x_line, a.y_line]
    low.launch(
        program("signal/kernels", GROUP=group, WINDOW=int(windowed), **macros),
        "lines",
        [*operands, *sizes, *steps, a.hermitian, a.direction],
        (units * group,),
        (group,),
    )

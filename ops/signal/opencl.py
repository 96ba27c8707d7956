"""DFT and STFT on OPENCL: the CPU's shape work, another kernel, in double precision if it can."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from subgraph.engine.planner.lowering import Operand, Weight, Word
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.opencl.lowering import ClLowering, cl_kernel, cl_shared
from subgraph.opencl.runtime import ClSource
from subgraph.ops.elementwise.cpu import temporary
from subgraph.ops.shared.opencl_code import register, require

cl_shared("DFT", "STFT")
_TEAM = 128  # work-items of a GPU that share a line


@cl_kernel("subgraph.ops.signal.kernels", "lines")
def lines(low: ClLowering, kernel: Kernel, words: Sequence[Word]) -> None:
    """Launch the transformation of lines."""
    variant: dict[str, Any] = dict(kernel.variant)
    dtype = variant["dtype"]
    require(low, dtype)
    x, y, window, table = words[:4]
    size, radices = words[5], [word for word in words[21:] if isinstance(word, int)]
    results, numbers = words[6], words[8]
    assert isinstance(y, Operand)
    assert isinstance(size, int)
    assert isinstance(results, int)
    assert isinstance(numbers, int)
    assert isinstance(table, Weight)
    units = y.size // (results * numbers)
    work = "float64" if low.traits.fp64 else dtype
    circle = Weight(f"in {work}", partial(np.asarray, dtype=work), (table,))
    factors = low.weight("factors", np.array, np.array(radices or [1], np.int32))
    held = temporary(low, work, (units * 4 * size,))
    group = _TEAM if low.traits.is_gpu else 1
    given = not isinstance(window, int)
    defines: dict[str, str | int] = {
        "GROUP": group,
        "T": register(dtype),
        "W": register(work),
        "WINDOW": int(given),
    }
    places = [x, y, window if given else x, circle, factors, held]
    low.launch(
        ClSource("signal/kernels", defines=tuple(sorted(defines.items()))),
        "lines",
        [*places, len(radices), *words[4:18]],
        (units * group,),
        (group,),
    )

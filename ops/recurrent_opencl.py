"""LSTM, GRU, RNN and RotaryEmbedding on OPENCL: the CPU's shape work, other kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from subgraph.engine.kernel import Kernel
from subgraph.engine.lowering import Operand, Word
from subgraph.opencl.lowering import ClLowering, cl_kernel, cl_shared
from subgraph.opencl.runtime import ClSource

from .elementwise_cpu import temporary
from .opencl_code import line, register, require

cl_shared("LSTM", "GRU", "RNN", "RotaryEmbedding")
_GATES = {"LSTM": 4, "GRU": 3}
_TEAM = 128  # work-items of a GPU that share a sequence
_BLOCK = 16  # neighbouring columns that a CPU sums in registers


@cl_kernel("recurrent_kernels", "cells")
def cells(low: ClLowering, kernel: Kernel, words: Sequence[Word]) -> None:
    """Launch the steps of recurrent cells."""
    variant: dict[str, Any] = dict(kernel.variant)
    dtype, kind = variant["dtype"], variant["kind"]
    require(low, dtype)
    steps, batch, width, directions, reverse = words[8:13]
    assert isinstance(batch, int)
    assert isinstance(width, int)
    assert isinstance(directions, int)
    gates, units = _GATES.get(kind, 1), directions * batch
    group, block = (_TEAM, 1) if low.traits.is_gpu else (1, _BLOCK)
    names = ("HAS_H", "HAS_C", "HAS_Y", "HAS_H_LAST", "HAS_C_LAST")
    flags = {name: int(not isinstance(words[3 + k], int)) for k, name in enumerate(names)}
    numbers = {"CELL": gates, "LINEAR": int(variant["linear"]), "RELU": int(kind == "Relu")}
    defines = {"T": register(dtype), "GROUP": group, "BLOCK": block, **numbers, **flags}
    held = temporary(low, dtype, (units * (gates + 4) * width,))
    # A buffer that is not there is never touched; the memory of the group stands in for it.
    places = [held if isinstance(word, int) else word for word in words[:8]]
    low.launch(
        ClSource("recurrent", defines=tuple(sorted(defines.items()))),
        "cells",
        [*places, held, steps, batch, width, directions, reverse],
        (units * group,),
        (group,),
    )


@cl_kernel("rotary_kernels", "rotate")
def rotate(low: ClLowering, kernel: Kernel, words: Sequence[Word]) -> None:
    """Launch RotaryEmbedding."""
    variant: dict[str, Any] = dict(kernel.variant)
    dtype = variant["dtype"]
    require(low, dtype)
    x, y, cosines, sines, positions, heads, tokens, size, half, *steps, rows = words
    assert isinstance(x, Operand)
    known = not isinstance(positions, int)
    flags = {"PAIRS": int(variant["interleaved"]), "POSITIONS": int(known)}
    defines = {"T": register(dtype), **flags}
    places = [x, y, cosines, sines, positions if known else x]
    elements = [step // x.itemsize for step in steps if isinstance(step, int)]
    low.launch(
        ClSource("rotary", defines=tuple(sorted(defines.items()))),
        "turn",
        [x.size, *places, heads, tokens, size, half, *elements, rows],
        *line(low, x.size),
    )

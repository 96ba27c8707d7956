"""The transposition of one block of ``lanes x lanes`` elements in registers.

What packs operands, turns layouts and reads masks across their rows is made of this block.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from llvmlite import ir

from subgraph.engine.irtools import I32, I64, INT64, VOID, define, first_lanes, load_at
from subgraph.engine.simd import vec


def exchange(builder: Any, rows: list[Any]) -> list[Any]:
    """Emit the transposition of a square of vectors: in step s, blocks of s x s change places."""
    lanes = len(rows)
    step = 1
    while step < lanes:
        keep = [e if not e & step else e - step + lanes for e in range(lanes)]
        take = [e + step if not e & step else e + lanes for e in range(lanes)]
        low, high = (
            ir.Constant(ir.VectorType(I32, lanes), [I32(e) for e in p]) for p in (keep, take)
        )
        turned = list(rows)
        for i in range(lanes):
            if not i & step:
                turned[i] = builder.shuffle_vector(rows[i], rows[i + step], low)
                turned[i + step] = builder.shuffle_vector(rows[i], rows[i + step], high)
        rows, step = turned, step * 2
    return rows


@cache
def transposer(dtype: str, lanes: int) -> Any:
    """Return ``turn(source, source step, rows, columns, target, target step)``.

    It copies ``rows x columns`` elements (each at most ``lanes``) so that row i of the source
    becomes column i of the target; nothing else is read or written. Steps are bytes between rows.
    """
    v = vec(dtype, lanes)

    def whole(builder: Any, args: Sequence[Any]) -> None:
        source, step, _, _, target, to = args
        rows: list[Any] = []
        for i in range(lanes):
            at = builder.add(source, builder.mul(step, I64(i)))
            rows.append(load_at(builder, at, v.llvm, v.itemsize))
        for i, row in enumerate(exchange(builder, rows)):
            at = builder.add(target, builder.mul(to, I64(i)))
            stored = builder.store(row, builder.inttoptr(at, ir.PointerType()))
            stored.align = v.itemsize

    def part(builder: Any, args: Sequence[Any]) -> None:
        source, step, height, width, target, to = args
        rows: list[Any] = []
        none = I64(0)
        for i in range(lanes):
            count = builder.select(builder.icmp_signed(">", height, I64(i)), width, none)
            at = builder.add(source, builder.mul(step, I64(i)))
            rows.append(v.emit_load(builder, at, first_lanes(builder, count, lanes)))
        for i, row in enumerate(exchange(builder, rows)):
            count = builder.select(builder.icmp_signed(">", width, I64(i)), height, none)
            at = builder.add(target, builder.mul(to, I64(i)))
            v.emit_store(builder, at, first_lanes(builder, count, lanes), row)

    def emit(builder: Any, _context: Any, args: Sequence[Any]) -> None:
        full = I64(lanes)
        rows = builder.icmp_signed("==", args[2], full)
        columns = builder.icmp_signed("==", args[3], full)
        with builder.if_else(builder.and_(rows, columns)) as (then, otherwise):
            with then:
                whole(builder, args)
            with otherwise:
                part(builder, args)

    return define(VOID, [INT64] * 6, emit)

"""Product of a few rows of states with recurrence weights in panels.

Unlike `subgraph.engine.codegen.tile` it takes its arguments in registers, not in a block: a step of
a small cell takes a microsecond or two, of which writing the block would be a good part. And with
one or two rows its tiles have more vectors, so that there are enough independent sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

from subgraph.engine.codegen.dot import emit_dot4
from subgraph.engine.codegen.emit import Emit, private_function
from subgraph.engine.codegen.irtools import I32, load_at, splat_value, store_at

Function = Callable[..., Any]
_I64 = ir.IntType(64)
_UNROLL = 4  # steps of the depth in an iteration, a power of two (estimate)
# Of a tile: A, bytes between its rows, B, bytes between its rows, depth, and with bytes between
# rows each, start and C.
_ARGUMENTS = 9


def product(dtype: str, lanes: int, rows: int, nv: int) -> Function:
    """Return ``f(count, a, ars, b, vectors, depth, start, srs, c, crs)``: ``C = start + A @ B``.

    ``count`` rows, at most ``rows``, and ``vectors`` vectors of columns. ``ars``, ``srs`` and
    ``crs`` are the bytes between rows of A, start (0: one row for all) and C. Terms are added in an
    order that depends neither on ``count`` nor on ``nv``.

    Args:
        dtype: ``"float32"``, ``"float64"``, or ``"int8"``: A is uint8, B int8, a step of the depth
            is four adjacent bytes of a row or column, C is int32 and there is no start.
        lanes: Elements of a vector of C.
        rows: Most rows.
        nv: Vectors of a panel of B; the vectors that remain are panels of one.
    """
    tile = _tiles(dtype, lanes, rows, nv)
    size = lanes * (8 if dtype == "float64" else 4)

    @register_jitable
    def run(
        count: int,
        a: int,
        ars: int,
        b: int,
        vectors: int,
        depth: int,
        start: int,
        srs: int,
        c: int,
        crs: int,
    ) -> None:
        whole = vectors // nv * nv
        at = 0
        while at < whole:
            panel = b + at * depth * size
            to = at * size
            tile(count * 2 + 1, a, ars, panel, nv * size, depth, start + to, srs, c + to, crs)
            at += nv
        panel = b + whole * depth * size
        step = (vectors - whole) * size
        while at < vectors:
            to = at * size
            tile(count * 2, a, ars, panel, step, depth, start + to, srs, c + to, crs)
            panel += size
            at += 1

    return run


def _tiles(dtype: str, lanes: int, rows: int, nv: int) -> Any:
    """Return the intrinsic that runs one tile.

    Its first argument is ``2 * count + 1`` for a tile of ``count`` rows and ``nv`` vectors, and
    ``2 * count`` for one of one vector; a switch calls the function of that tile.
    """

    @intrinsic
    def dispatch(
        typingctx: Any, which: Any, a: Any, ars: Any, b: Any, bks: Any, depth: Any, start: Any,
        srs: Any, c: Any, crs: Any,
    ) -> tuple[Any, Any]:  # fmt: skip
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            done = builder.append_basic_block("product_done")
            switch = builder.switch(args[0], done)
            for count in range(1, rows + 1):
                for whole in (0, 1):
                    function = _define(builder.module, dtype, lanes, count, nv if whole else 1)
                    case = builder.append_basic_block("product")
                    switch.add_case(_I64(2 * count + whole), case)
                    with builder.goto_block(case):
                        builder.call(function, list(args[1:]))
                        builder.branch(done)
            builder.position_at_end(done)
            return context.get_dummy_value()

        return types.void(*[types.int64] * (_ARGUMENTS + 1)), codegen

    return dispatch


def _define(module: Any, dtype: str, lanes: int, rows: int, nv: int) -> Any:
    """Return the function of a tile in a module."""
    name = f"product_{dtype}_{lanes}_{rows}x{nv}"
    found = module.globals.get(name)
    if found is not None:
        return found
    function = private_function(module, name, _ARGUMENTS)
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    if dtype == "int8":
        _byte_body(Emit(builder, "float32", lanes), function.args, rows, nv)
    else:
        _body(Emit(builder, dtype, lanes), function.args, rows, nv)
    builder.ret_void()
    return function


def _body(e: Emit, args: Any, rows: int, nv: int) -> None:
    """Emit a tile of floats; ``args`` are the tile's arguments."""
    start, srs, c, crs = args[5:]
    sums = [[e.variable(e.load(_at(e, start, srs, i, j))) for j in range(nv)] for i in range(rows)]
    _accumulate(e, args, sums, e.load, e.broadcast, e.fma)
    for i in range(rows):
        for j in range(nv):
            e.store(e.get(sums[i][j]), _at(e, c, crs, i, j))


def _byte_body(e: Emit, args: Any, rows: int, nv: int) -> None:
    """Emit a tile of bytes; ``args`` are the tile's arguments."""
    c, crs = args[7:]
    kind = ir.VectorType(I32, e.lanes)
    sums = [[e.variable(ir.Constant(kind, [0] * e.lanes)) for _ in range(nv)] for _ in range(rows)]
    _accumulate(
        e,
        args,
        sums,
        lambda at: load_at(e.b, at, kind, 4),
        lambda at: splat_value(e.b, load_at(e.b, at, I32, 1), e.lanes),
        lambda a, b, total: emit_dot4(e.b, total, a, b),
    )
    for i in range(rows):
        for j in range(nv):
            store_at(e.b, _at(e, c, crs, i, j), e.get(sums[i][j]), 4)


def _at(e: Emit, base: Any, step: Any, row: int, vector: int) -> Any:
    """Emit the address of a vector of a row."""
    return e.b.add(e.b.add(base, e.b.mul(step, e.const(row))), e.const(vector * e.lanes * e.item))


def _accumulate(
    e: Emit,
    args: Any,
    sums: Sequence[Sequence[Any]],
    load: Callable[[Any], Any],
    broadcast: Callable[[Any], Any],
    multiply: Callable[[Any, Any, Any], Any],
) -> None:
    """Emit the loop over the depth.

    Args:
        e: The emitter.
        args: Arguments of the tile.
        sums: Variables of the sums, for each row one for each vector.
        load: Emits the load of a vector of B.
        broadcast: Emits the load of an element of A into all lanes.
        multiply: ``(element, vector, sum) -> sum``.
    """
    a, ars, b, bks, depth = args[:5]
    rows, nv = len(sums), len(sums[0])
    size = e.lanes * e.item
    if nv > 1:
        bks = e.const(nv * size)
    at_a, at_b = e.variable(a), e.variable(b)
    starts = [e.b.mul(ars, e.const(i)) for i in range(rows)]

    def steps(unroll: int) -> None:
        # Opaque to LLVM, which would else derive each address from the one before: a dependency
        # chain that takes as long as the sums.
        av, bv = e.opaque(e.get(at_a)), e.opaque(e.get(at_b))
        for k in range(unroll):
            row = e.b.add(bv, e.b.mul(bks, e.const(k)))
            vectors = [load(e.b.add(row, e.const(j * size))) for j in range(nv)]
            for i in range(rows):
                x = broadcast(e.b.add(e.b.add(av, starts[i]), e.const(k * e.item)))
                for j in range(nv):
                    e.put(sums[i][j], multiply(x, vectors[j], e.get(sums[i][j])))
            e.fence()
        e.put(at_a, e.b.add(av, e.const(unroll * e.item)))
        e.put(at_b, e.b.add(bv, e.b.mul(bks, e.const(unroll))))

    with e.loop(e.b.ashr(depth, e.const(_UNROLL.bit_length() - 1))):
        steps(_UNROLL)
    with e.loop(e.b.and_(depth, e.const(_UNROLL - 1))):
        steps(1)

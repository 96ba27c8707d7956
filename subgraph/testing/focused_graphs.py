"""A strategy for graphs of chosen operators among others, with branches that join."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

import subgraph as sg
from subgraph.errors import SubgraphError
from subgraph.graph.graph import Graph, Value
from subgraph.operators.schema import get_schema
from subgraph.testing import rare_templates as rare
from subgraph.testing.graph_templates import (
    TEMPLATES,
    Apply,
    Draw,
    Pool,
    apply_one,
    dims,
    draw_int,
    drawn_outputs,
    dtype,
    make,
    operator_of,
)
from subgraph.testing.samples import samples

_FLOATS = ((4,), (2, 3), (3, 3), (2, 3, 4), (1, 2, 4, 4), (2, 6, 5, 5), (1, 2, 3, 4, 3), ())
_OTHERS = ("bool", "int64", "int32", "int8", "uint8", "float64", "float16")
_JOINS = ("Add", "Sub", "Mul", "Max", "Concat")
# With more operators than this, only those without template get samples (whose import is slow), and
# at most this many of them.
_MAX_SAMPLED = 12


def templates_of(op_types: Collection[str]) -> dict[str, Apply]:
    """Return the templates of these operators, and samples of them from ONNX's test suite."""
    every = {**TEMPLATES, **rare.RARE_TEMPLATES}
    table = {name: apply for name, apply in every.items() if operator_of(name) in op_types}
    known = {operator_of(name) for name in table}
    wanted = sorted(op_types)
    if len(wanted) > _MAX_SAMPLED:
        missing = [name for name in wanted if name not in known]
        # Evenly spaced in the sorted names, so that the choice does not favour one letter.
        step = max(1, -(-len(missing) // _MAX_SAMPLED))
        wanted = missing[::step]
    table.update(samples(wanted))
    pairs = (name for name in op_types if get_schema(name).max_inputs > 1)
    return {**table, **{f"{name}#pair": _pair for name in pairs}}


def _pair(draw: Draw, pool: Pool, name: str) -> Any:
    """Apply an operator to two values of one shape, the first pair that it accepts."""
    floats = [v for v in pool.values if dtype(v) == "float32"]
    first = draw_int(draw, 0, len(floats)) if floats else 0
    for x in floats[first:] + floats[:first]:
        others = [v for v in floats if dims(v) == dims(x) and v is not x]
        y = draw(st.sampled_from(others)) if others else pool.feed(dims(x))
        try:
            return make(name, x, y)
        except SubgraphError:
            continue
    return None


def by_operator(table: Mapping[str, Apply]) -> dict[str, Apply]:
    """Return one template for each operator, which draws one of the operator's templates.

    Templates and samples of an operator that has both are equally likely.
    """
    general: dict[str, list[str]] = {}
    sampled: dict[str, list[str]] = {}
    for name in table:
        op_type, _, number = name.removesuffix("*").partition("#")
        (sampled if number.isdigit() else general).setdefault(op_type, []).append(name)

    def one_of(op_type: str) -> Apply:
        groups = [group[op_type] for group in (general, sampled) if op_type in group]

        def apply(draw: Draw, pool: Pool, name: str) -> Any:
            chosen = draw(st.sampled_from(draw(st.sampled_from(groups))))
            return table[chosen](draw, pool, op_type)

        return apply

    return {op_type: one_of(op_type) for op_type in {**general, **sampled}}


@st.composite
def focused_graphs(
    draw: Draw,
    focus: Mapping[str, Apply],
    neighbours: Mapping[str, Apply],
    max_nodes: int,
    starts: Mapping[str, Apply],
    chains: Sequence[tuple[Sequence[str], int]],
) -> Graph:
    """Draw a graph in which operators of ``focus`` are among others.

    Some values are inputs of two branches that join again; second operands are weights, graph
    inputs or results.

    Args:
        draw: Given by hypothesis.
        focus: Templates of the operators that are tested.
        neighbours: Templates of the other operators.
        max_nodes: Largest number of applied operators, not counting joins.
        starts: Templates of the operators with which a graph begins.
        chains: Operators of ``neighbours`` that some graphs apply one after the other, and the rank
            of their operands.
    """
    shape = draw(st.sampled_from(_FLOATS))
    types = [(shape, "float32"), *((other, "float32") for other in _FLOATS)]
    types += [((2, 3), kind) for kind in _OTHERS]
    inputs = [sg.input(f"x{k}", *each) for k, each in enumerate(types)]
    pool = Pool([*inputs], fed=True)
    made: list[Value] = []
    for step in range(draw_int(draw, 1, max(1, max_nodes))):
        how = draw(st.sampled_from(["focus", "chain", "chain", "fork", "around", "join"]))
        # The first operator is one of those that are tested, so that no graph is without them.
        how = how if step else "focus"
        if how == "join":
            made += _join(draw, pool, made)
        elif how == "chain":
            table = focus if draw(st.booleans()) else neighbours
            made += _apply_to(draw, pool, table, made[-3:], 1)
        elif how == "fork":
            both = _apply_to(draw, pool, {**neighbours, **focus}, made[-3:], 2)
            made += both
            made += _join(draw, pool, both) if draw(st.booleans()) else []
        elif how == "around":
            made += apply_one(draw, pool, neighbours)
        elif chains and draw_int(draw, 0, 3) < 3:
            made += _apply_chain(draw, pool, neighbours, *draw(st.sampled_from(chains)))
        else:
            made += apply_one(draw, pool, starts)
    made = made or [sg.ops.Identity(inputs[0])]
    graph = Graph([*inputs, *pool.inputs], drawn_outputs(draw, made), name="random")
    needed = {v for node in graph.nodes for v in node.sources}
    graph.inputs = tuple(v for v in graph.inputs if v in needed)
    return graph


def _apply_to(
    draw: Draw, pool: Pool, table: Mapping[str, Apply], sources: Sequence[Value], count: int
) -> list[Value]:
    """Apply ``count`` operators of ``table`` to the same value, drawn from ``sources``."""
    fitting = [value for value in sources if value in pool.values]
    if not fitting:
        return []
    source = draw(st.sampled_from(fitting))
    # With one value in the pool every template has to use it.
    kept, pool.values = pool.values, [source]
    made: list[Value] = []
    for _ in range(count):
        made += apply_one(draw, pool, table)
        kept += [value for value in pool.values if value is not source]
        pool.values = [source]
    pool.values = kept
    return made


def _apply_chain(
    draw: Draw, pool: Pool, table: Mapping[str, Apply], names: Sequence[str], rank: int
) -> list[Value]:
    """Apply operators of ``table`` one after the other, most often with weights."""
    pool.weighted = draw_int(draw, 0, 3) < 3
    first = {names[0]: table[names[0]]}
    kept, pool.values = pool.values, [v for v in pool.values if len(dims(v)) == rank]
    made = apply_one(draw, pool, first)
    pool.values = [*kept, *(v for v in made if v in pool.values)]
    made = made or apply_one(draw, pool, first)
    for name in names[1:]:
        made += _apply_to(draw, pool, {name: table[name]}, made[-1:], 1)
    pool.weighted = False
    return made


def _join(draw: Draw, pool: Pool, made: list[Value]) -> list[Value]:
    """Combine two values of ``made`` of one shape by an operator; [] if there is no such pair."""
    here = set(pool.values)
    floats = [v for v in made if v in here and dtype(v) == "float32"]
    pairs = [
        (a, b) for k, b in enumerate(floats) for a in floats[:k] if dims(a) == dims(b) and a != b
    ]
    if not pairs:
        return []
    one, two = draw(st.sampled_from(pairs[-12:]))
    name = draw(st.sampled_from(_JOINS if dims(one) else _JOINS[:-1]))
    joined: Value = make(name, one, two, **({"axis": 0} if name == "Concat" else {}))
    pool.values.append(joined)
    return [joined]

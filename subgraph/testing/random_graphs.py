"""Hypothesis strategies: graphs of various operators or topologies, and selectors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from hypothesis import strategies as st

import subgraph as sg
from subgraph.graph.graph import Graph, Value
from subgraph.graph.types import TensorType, numpy_dtype
from subgraph.testing import rare_templates as rare
from subgraph.testing.graph_templates import (
    TEMPLATES,
    Draw,
    Pool,
    draw_int,
    drawn_outputs,
    grow,
    make,
)
from subgraph.testing.random_selectors import MISBEHAVING, WELL_BEHAVED, Recipe

# Few and small, so that values of equal shape are frequent and the reference is fast.
_SHAPES = ((4,), (2, 3), (1, 2, 4, 4), (2, 3, 4))


@st.composite
def graphs(
    draw: Draw,
    *,
    min_nodes: int = 1,
    max_nodes: int = 12,
    ops: Collection[str] | None = None,
    corners: bool = False,
) -> Graph:
    """Draw a valid graph of various operators, with static shapes and seeded weights.

    Args:
        draw: Given by hypothesis.
        min_nodes: Smallest number of draws of an operator; one without fitting operands adds no
            node.
        max_nodes: Largest number of draws of an operator.
        ops: Operators to draw; None: all that have a template. Others are ignored.
        corners: Whether rare operators, attributes, dtypes and shapes are drawn, too: those of
            `subgraph.testing.rare_templates`.
    """
    table = TEMPLATES
    dtypes: tuple[str, ...] = ("float32",)
    possible: tuple[tuple[int, ...], ...] = _SHAPES
    if corners:
        table, dtypes, possible = (
            {**rare.RARE_TEMPLATES, **TEMPLATES},
            rare.RARE_DTYPES,
            _SHAPES + rare.RARE_SHAPES,
        )
    names = [name for name in table if ops is None or name in ops] or ["Relu"]
    shapes = draw(st.lists(st.sampled_from(possible), min_size=1, max_size=2 + corners))
    kinds = [draw(st.sampled_from(dtypes)) if corners else "float32" for _ in shapes]
    inputs = [sg.input(f"x{k}", *each) for k, each in enumerate(zip(shapes, kinds, strict=True))]
    pool = Pool(list(inputs))
    grow(draw, pool, {name: table[name] for name in names}, draw_int(draw, min_nodes, max_nodes))
    made = pool.values[len(inputs) :] or [sg.ops.Identity(inputs[0])]
    return Graph(inputs, drawn_outputs(draw, made), name="random")


_SEEDS = st.integers(0, 10_000)
_UNARY = ("Relu", "Tanh", "Sin", "Neg", "Sigmoid")
_MANY = ("Sum", "Max", "Mean", "Min")


@st.composite
def topologies(draw: Draw, *, min_nodes: int = 1, max_nodes: int = 24, reach: int = 6) -> Graph:
    """Draw a graph of arbitrary topology: elementwise operators on vectors of four floats.

    Args:
        draw: Given by hypothesis.
        min_nodes: Smallest number of nodes.
        max_nodes: Largest number of nodes.
        reach: A node's inputs are among the outputs of this many nodes before it.
    """
    x = sg.input("x", (4,), "float32")
    made: list[Value] = []
    used: set[Value] = set()
    for number in range(draw_int(draw, min_nodes, max_nodes)):
        near = made[-reach:]
        wanted = draw_int(draw, 0, min(3, len(near))) if near else 0
        shuffled: list[Value] = list(draw(st.permutations(near))) if wanted else []
        sources = shuffled[:wanted]
        name = draw(st.sampled_from(_UNARY if len(sources) < 2 else _MANY))
        used.update(sources)
        made.append(make(name, *(sources or [x]), name=f"n{number}"))
    return Graph([x], [v for v in made if v not in used], name="topology")


def selectors() -> st.SearchStrategy[Recipe]:
    """Draw factories of selectors that obey the contract, stateless and stateful ones."""
    return st.builds(Recipe, st.sampled_from(WELL_BEHAVED), _SEEDS)


def misbehaving_selectors() -> st.SearchStrategy[Recipe]:
    """Draw factories of selectors that raise, return foreign nodes, or answer inconsistently."""
    return st.builds(Recipe, st.sampled_from(MISBEHAVING), _SEEDS)


def feeds(graph: Graph, seed: int = 0, sizes: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Return random inputs for a graph: uniform in [-2, 2), integers truncated, unsigned in [0, 2).

    Args:
        graph: The graph; all its inputs are tensors.
        seed: Seed of the random numbers.
        sizes: Sizes of symbolic dimensions by name; others, and unknown dimensions, are 2.

    Returns:
        The arrays by name of the input.
    """
    rng = np.random.default_rng(seed)
    out: dict[str, Any] = {}
    for value in graph.inputs:
        assert isinstance(value.type, TensorType)
        named = ["" if d is None else d for d in value.type.shape or ()]
        shape = [d if isinstance(d, int) else (sizes or {}).get(d, 2) for d in named]
        kind = numpy_dtype(value.type.dtype)
        array = np.abs(rng.uniform(-2, 2, shape)) if kind.kind == "u" else rng.uniform(-2, 2, shape)
        out[value.name] = np.asarray(array > 0) if kind.kind == "b" else np.asarray(array, kind)
    return out

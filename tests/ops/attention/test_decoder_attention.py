"""DecoderAttention against float64 NumPy: positions, windows, sinks and bounds of scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph.graph.graph import Node
from subgraph.graph.types import Array, TensorType
from subgraph.operators.inference import set_output_types
from subgraph.operators.schema import INTERNAL_DOMAIN
from tests.support.kernels import run_node


def reference(
    inputs: list[Any], scale: float, causal: bool, window: int = 0, softcap: float = 0.0
) -> Array:
    """Return the result in float64, by weights of all keys and of the sink."""
    q, k, v, mask, starts, sinks = inputs
    share = q.shape[1] // k.shape[1]
    q, k, v = q.astype(float), k.astype(float).repeat(share, 1), v.astype(float).repeat(share, 1)
    scores = q @ k.swapaxes(2, 3) * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    if mask is not None and mask.dtype == bool:
        scores = np.where(mask, scores, -np.inf)
    elif mask is not None:
        scores = scores + mask.astype(float)
    for b, start in enumerate(np.zeros(len(q), int) if starts is None else starts):
        for i in range(scores.shape[2] if causal else 0):
            scores[b, :, i, start + i + 1 :] = -np.inf
            if window:
                scores[b, :, i, : max(start + i + 1 - window, 0)] = -np.inf
    of_sinks = np.full(q.shape[1], -np.inf) if sinks is None else sinks.astype(float)
    of_sinks = np.broadcast_to(of_sinks[:, None, None], (*scores.shape[:3], 1))
    scores = np.concatenate([scores, of_sinks], 3)
    top = scores.max(3, keepdims=True)
    weights = np.exp(scores - np.where(np.isinf(top), 0, top))
    total = weights.sum(3, keepdims=True)
    weights /= np.where(total == 0, 1, total)
    return weights[..., :-1] @ v


def operands(
    batch: int, heads: tuple[int, int], positions: tuple[int, int], sizes: tuple[int, int],
    mask: str, dtype: str, *, starts: bool = False, sinks: bool = True,
) -> list[Any]:  # fmt: skip
    """Return Q, K, V, the mask, which hides all keys of some queries, positions and sinks."""
    rng = np.random.default_rng(sum(positions) + sum(sizes))
    (queries, keys), (size, values) = positions, sizes
    shapes = [(heads[0], queries, size), (heads[1], keys, size), (heads[1], keys, values)]
    q, k, v = (rng.standard_normal((batch, *shape)).astype(dtype) for shape in shapes)
    seen = rng.random((batch, 1, queries, keys)) < 0.7
    seen[0, 0, -1] = False
    masks = {"none": None, "bool": seen, "float": np.where(seen, 0.5, -np.inf).astype(dtype)}
    first = rng.integers(0, max(keys - queries, 0) + 1, batch) if starts else None
    of_sinks = (3 * rng.standard_normal(heads[0])).astype(dtype) if sinks else None
    return [q, k, v, masks[mask], first, of_sinks]


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 2),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 2), (6, 2), (10, 1)]),
    positions=st.tuples(
        st.sampled_from([1, 2, 7, 40, 130]), st.sampled_from([1, 7, 8, 9, 200, 600])
    ),
    sizes=st.tuples(st.sampled_from([1, 8, 37]), st.sampled_from([1, 16, 41])),
    mask=st.sampled_from(["none", "bool", "float"]),
    dtype=st.sampled_from(["float32", "float64"]),
    starts=st.booleans(),
    sinks=st.booleans(),
    causal=st.booleans(),
    window=st.sampled_from([0, 0, 1, 5, 20, 300]),
    softcap=st.sampled_from([0.0, 0.25, 2.0]),
    threads=st.integers(1, 3),
)
def test_kernels(causal: bool, window: int, softcap: float, threads: int, **drawn: Any) -> None:
    inputs = operands(**drawn)
    q, v = inputs[0], inputs[2]
    window *= causal
    attributes = {"scale": 0.3, "is_causal": int(causal), "window": window, "softcap": softcap}
    shape = (*q.shape[:3], v.shape[3])
    (got,) = run_node(
        "DecoderAttention", inputs, [shape], attributes, domain=INTERNAL_DOMAIN, threads=threads
    )
    expected = reference(inputs, 0.3, causal, window, softcap)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", ["CPU", "REFERENCE", "OPENCL"])
@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("mask", ["none", "bool", "float"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_devices(device: str, rank: int, mask: str, dtype: str, softcap: float) -> None:
    inputs = operands(2, (4, 2), (9, 21), (8, 12), mask, dtype, starts=True)
    expected = reference(inputs, 8**-0.5, True, 6, softcap)
    attributes: dict[str, Any] = {"is_causal": 1, "window": 6, "softcap": softcap}
    if rank == 3:
        inputs[:3] = [x.swapaxes(1, 2).reshape(2, x.shape[2], -1) for x in inputs[:3]]
        expected = expected.swapaxes(1, 2).reshape(2, 9, -1)
        attributes |= {"q_num_heads": 4, "kv_num_heads": 2}
    values = [
        None if x is None else sg.Value(f"x{k}", TensorType(str(x.dtype), x.shape))
        for k, x in enumerate(inputs)
    ]
    node = Node("DecoderAttention", values, domain=INTERNAL_DOMAIN, version=1, attrs=attributes)
    set_output_types(node)
    graph = sg.Graph([value for value in values if value is not None], [node.outputs[0]])
    placed = sg.default_core().query_model(graph, device)
    assert set(placed) == {each.name for each in graph.nodes}, placed.reasons
    made = sg.compile_model(graph, device)([x for x in inputs if x is not None])[0]
    tolerance = 1e-4 if dtype == "float32" else 4e-3
    np.testing.assert_allclose(made, expected, rtol=tolerance, atol=tolerance)


def test_a_sink_that_weighs_nothing() -> None:
    """The result is that of Attention, and 0 where a query sees no key."""
    inputs = operands(2, (4, 2), (3, 21), (8, 12), "float", "float32")
    inputs[5][:] = -np.inf
    (got,) = run_node("DecoderAttention", inputs, [(2, 4, 3, 12)], {}, domain=INTERNAL_DOMAIN)
    (plain,) = run_node("Attention", inputs[:4], [(2, 4, 3, 12)], {})
    np.testing.assert_array_equal(got, plain)
    assert (got[0, :, -1] == 0).all()


@pytest.mark.parametrize("wrong", [(3,), (4, 1), ()])
def test_sinks_of_another_size(wrong: tuple[int, ...]) -> None:
    inputs = operands(1, (4, 2), (3, 5), (8, 8), "none", "float32")
    types = [None if x is None else TensorType("float32", x.shape) for x in inputs[:4]]
    values = [None if t is None else sg.Value(f"x{k}", t) for k, t in enumerate(types)]
    sinks = sg.input("sinks", wrong, "float32")
    node = Node("DecoderAttention", [*values, None, sinks], domain=INTERNAL_DOMAIN, version=1)
    with pytest.raises(sg.ShapeError, match="one for each head"):
        set_output_types(node)


@pytest.mark.parametrize("device", ["CPU", "REFERENCE", "OPENCL"])
@pytest.mark.parametrize("queries", [1, 3, 40])
@pytest.mark.parametrize("window", [0, 4, 2**63 - 1])
def test_positions_outside_of_the_keys(device: str, queries: int, window: int) -> None:
    """Positions are inputs: those before the first key count as 0, those after the last as it."""
    inputs = operands(4, (4, 2), (queries, 21), (8, 12), "none", "float32", starts=True)
    inputs[4] = np.array([-(2**63), -3, 30, 2**63 - 1])
    inputs[4], wrong = np.clip(inputs[4], 0, 21), inputs[4]
    expected = reference(inputs, 8**-0.5, True, window)
    values = [
        None if x is None else sg.Value(f"x{k}", TensorType(str(x.dtype), x.shape))
        for k, x in enumerate(inputs)
    ]
    node = Node(
        *("DecoderAttention", values),
        domain=INTERNAL_DOMAIN,
        version=1,
        attrs={"is_causal": 1, "window": window},
    )
    set_output_types(node)
    graph = sg.Graph([value for value in values if value is not None], [node.outputs[0]])
    inputs[4] = wrong
    made = sg.compile_model(graph, device)([x for x in inputs if x is not None])[0]
    np.testing.assert_allclose(made, expected, rtol=1e-4, atol=1e-5)

"""Matrix products against float64 NumPy: shapes with rests, transposed, batched, fused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.shared.activations import ACTIVATIONS as FUSED_ACTIVATIONS
from tests.support.kernels import run_node

SIZES = st.integers(1, 70)
DTYPES = st.sampled_from(["float32", "float64"])
CUTS = st.lists(st.floats(0, 1), max_size=3)
QUICK = settings(max_examples=40, deadline=None)


def random(seed: int, shape: tuple[int, ...], dtype: str) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def close(got: Array, wanted: Array) -> None:
    scale = max(float(np.abs(wanted).max(initial=0.0)), 1.0)
    tolerance = (3e-6 if got.dtype == np.float32 else 1e-13) * scale
    np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance)


@QUICK
@given(
    sizes=st.tuples(SIZES, SIZES, SIZES),
    weight=st.booleans(),
    dtype=DTYPES,
    cuts=CUTS,
    threads=st.integers(1, 3),
)
def test_matmul(
    sizes: tuple[int, int, int], weight: bool, dtype: str, cuts: list[float], threads: int
) -> None:
    m, n, k = sizes
    a, b = random(1, (m, k), dtype), random(2, (k, n), dtype)
    (got,) = run_node(
        "MatMul", [a, b], [(m, n)], constant=[1] if weight else [], threads=threads, cuts=cuts
    )
    close(got, a.astype(np.float64) @ b)


@QUICK
@given(
    case=st.sampled_from(
        [
            ((2, 3, 5, 7), (7, 9)),
            ((2, 3, 5, 7), (3, 7, 9)),
            ((1, 3, 5, 7), (2, 1, 7, 33)),
            ((20, 17), (4, 17, 40)),
            ((2, 1, 3, 20, 17), (2, 4, 1, 17, 40)),
            ((7,), (7, 5)),
            ((4, 5, 7), (7,)),
            ((7,), (7,)),
            ((3, 16, 1), (3, 1, 16)),
            ((2, 0, 3), (3, 4)),
            ((2, 3, 0), (0, 4)),
        ]
    ),
    weight=st.booleans(),
    cuts=CUTS,
)
def test_matmul_batches(
    case: tuple[tuple[int, ...], tuple[int, ...]], weight: bool, cuts: list[float]
) -> None:
    a, b = random(1, case[0], "float32"), random(2, case[1], "float32")
    wanted = np.matmul(a.astype(np.float64), b)
    (got,) = run_node("MatMul", [a, b], [wanted.shape], constant=[1] if weight else [], cuts=cuts)
    close(got, wanted)


@QUICK
@given(
    sizes=st.tuples(SIZES, SIZES, SIZES),
    turn=st.tuples(st.booleans(), st.booleans()),
    alpha=st.sampled_from([1.0, 0.5, -2.0]),
    beta=st.sampled_from([1.0, 0.25, 0.0]),
    shape=st.sampled_from(["none", "scalar", "row", "column", "matrix"]),
    dtype=DTYPES,
    cuts=CUTS,
)
def test_gemm(
    sizes: tuple[int, int, int],
    turn: tuple[bool, bool],
    alpha: float,
    beta: float,
    shape: str,
    dtype: str,
    cuts: list[float],
) -> None:
    m, n, k = sizes
    a, b = random(1, (m, k), dtype), random(2, (k, n), dtype)
    shapes = {"scalar": (), "row": (n,), "column": (m, 1), "matrix": (m, n)}
    c = None if shape == "none" else random(3, shapes[shape], dtype)
    wanted = alpha * (a.astype(np.float64) @ b) + (0 if c is None else beta * c)
    given_a = np.ascontiguousarray(a.T) if turn[0] else a
    given_b = np.ascontiguousarray(b.T) if turn[1] else b
    attrs = {"transA": int(turn[0]), "transB": int(turn[1]), "alpha": alpha, "beta": beta}
    (got,) = run_node("Gemm", [given_a, given_b, c], [(m, n)], attrs, constant=[1, 2], cuts=cuts)
    close(got, wanted)
    (again,) = run_node("Gemm", [given_a, given_b, c], [(m, n)], attrs, constant=[2], cuts=cuts)
    close(again, wanted)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize(("columns", "depth"), [(1, 1), (3, 2), (9, 3), (8, 4), (41, 5), (100, 8)])
def test_few_steps(columns: int, depth: int, weight: bool, turned: bool) -> None:
    a, b = random(1, (23, depth), "float32"), random(2, (depth, columns), "float32")
    c = random(3, (columns,), "float32")
    wanted = -0.5 * (a.astype(np.float64) @ b) + c
    given = [a, np.ascontiguousarray(b.T) if turned else b, c]
    attrs, known = {"transB": int(turned), "alpha": -0.5}, [1, 2] if weight else []
    results = [
        run_node("Gemm", given, [(23, columns)], attrs, constant=known, threads=t, cuts=cuts)[0]
        for t, cuts in [(1, []), (2, [0.5]), (3, [0.1, 0.7])]
    ]
    close(results[0], wanted)
    assert all(np.array_equal(results[0], other) for other in results[1:])
    wide = np.stack([a, -a])[:, None], np.stack([b, 2 * b, b])
    wanted = np.matmul(wide[0].astype(np.float64), wide[1])
    close(run_node("MatMul", list(wide), [wanted.shape], cuts=[0.4])[0], wanted)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 130), (1, 40, 27), (2, 41, 8), (2, 7, 0), (4, 19, 133), (8, 9, 300), (16, 400, 401)],
)
def test_few_rows_by_a_computed_matrix(
    sizes: tuple[int, int, int], dtype: str, turned: bool
) -> None:
    m, n, k = sizes
    a, b = random(1, (m, k), dtype), random(2, (k, n), dtype)
    c, r = random(3, (n,), dtype), random(4, (m, n), dtype)
    wanted = 0.75 * (a.astype(np.float64) @ b) + 0.5 * c
    given_b = np.ascontiguousarray(b.T) if turned else b
    attrs = {"transB": int(turned), "alpha": 0.75, "beta": 0.5}
    given = [a, given_b, c]
    results = [
        run_node("Gemm", given, [(m, n)], attrs, constant=[2], threads=t, cuts=cuts)[0]
        for t, cuts in [(1, []), (2, [0.5]), (3, [0.2, 0.7])]
    ]
    close(results[0], wanted)
    assert all(np.array_equal(results[0], other) for other in results[1:])
    given.append(r)
    (got,) = run_node("FusedMatMul", given, [(m, n)], attrs, domain=INTERNAL_DOMAIN, cuts=[0.3])
    close(got, wanted + r)


@QUICK
@given(
    shapes=st.sampled_from([((3,), (3,)), ((2, 3), (3,)), ((3,), (2, 1)), ((2, 1, 3), (2, 2, 1))]),
    rows=st.integers(1, 9),
    columns=st.sampled_from([1, 7, 8, 33, 140]),
    depth=st.sampled_from([1, 8, 15, 70]),
    threads=st.integers(1, 3),
    cuts=CUTS,
)
def test_few_rows_by_computed_matrices(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    rows: int,
    columns: int,
    depth: int,
    threads: int,
    cuts: list[float],
) -> None:
    a, b = (
        random(1, (*shapes[0], rows, depth), "float32"),
        random(2, (*shapes[1], depth, columns), "float32"),
    )
    wanted = np.matmul(a.astype(np.float64), b)
    (got,) = run_node("MatMul", [a, b], [wanted.shape], threads=threads, cuts=cuts)
    close(got, wanted)


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


ACTIVATIONS: dict[str, tuple[dict[str, Any], Any]] = {
    "Relu": ({}, relu),
    "Clip": ({"activation_alpha": -0.5, "activation_beta": 1.5}, lambda x: np.clip(x, -0.5, 1.5)),
    "Sigmoid": ({}, lambda x: 1 / (1 + np.exp(-x))),
    "Tanh": ({}, np.tanh),
    "HardSwish": ({}, lambda x: x * np.clip(x / 6 + 0.5, 0, 1)),
    "LeakyRelu": ({"activation_alpha": 0.1}, lambda x: np.where(x < 0, 0.1 * x, x)),
    "Silu": ({}, lambda x: x / (1 + np.exp(-x))),
    "Mish": ({}, lambda x: x * np.tanh(np.log1p(np.exp(x)))),
    "Elu": ({"activation_alpha": 0.7}, lambda x: np.where(x < 0, 0.7 * np.expm1(x), x)),
    "Swish": ({"activation_alpha": 1.7}, lambda x: x / (1 + np.exp(-1.7 * x))),
    "Softplus": ({}, lambda x: np.log1p(np.exp(x))),
    "HardSigmoid": (
        {"activation_alpha": 0.3, "activation_beta": 0.4},
        lambda x: np.clip(0.3 * x + 0.4, 0, 1),
    ),
    "GeluTanh": (
        {},
        lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    ),
}


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("sizes", [(5, 7, 9), (33, 70, 20), (1, 40, 64)])
def test_fused(act: str, sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    a, b = random(1, (2, m, k), "float32"), random(2, (k, n), "float32")
    c, r = random(3, (n,), "float32"), random(4, (2, m, n), "float32")
    attrs, function = ACTIVATIONS[act]
    (got,) = run_node(
        "FusedMatMul",
        [a, b, c, r],
        [(2, m, n)],
        {"activation": act, **attrs},
        domain=INTERNAL_DOMAIN,
        constant=[1, 2],
        cuts=[0.4],
    )
    close(got, function(a.astype(np.float64) @ b + c + r))


@pytest.mark.parametrize("act", sorted({*FUSED_ACTIVATIONS} - {"Clip"}))
def test_what_an_activation_gives_for_zero_is_stated(act: str) -> None:
    """Lowerings clear the padding channels of blocks unless the activation keeps zeros."""
    a, b = np.zeros((3, 8), np.float32), random(1, (8, 5), "float32")
    parameters = {"activation": act, "activation_alpha": 0.3, "activation_beta": 0.4}
    (got,) = run_node("FusedMatMul", [a, b], [(3, 5)], parameters, domain=INTERNAL_DOMAIN)
    assert (got == 0).all() == FUSED_ACTIVATIONS[act].keeps_zero


def test_same_bits_for_every_split() -> None:
    a, b = random(1, (150, 512), "float32"), random(2, (512, 200), "float32")
    results = [
        run_node("MatMul", [a, b], [(150, 200)], constant=[1], threads=t, cuts=cuts)[0]
        for t, cuts in [(1, []), (2, [0.5]), (5, [0.1, 0.37, 0.8])]
    ]
    assert all(np.array_equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("act", ["", "Gelu"])
@pytest.mark.parametrize("sizes", [(530, 200, 768), (128, 1536, 768), (65, 1000, 513)])
def test_blocks_of_large_products(sizes: tuple[int, int, int], act: str) -> None:
    m, n, k = sizes
    a, b, c = random(1, (m, k), "float32"), random(2, (k, n), "float32"), random(3, (n,), "float32")
    given, attrs = [a, b, c, random(4, (m, n), "float32")], {"activation": act} if act else {}
    results = [
        run_node(
            "FusedMatMul",
            given,
            [(m, n)],
            attrs,
            domain=INTERNAL_DOMAIN,
            constant=[1, 2],
            threads=t,
            cuts=cuts,
        )[0]
        for t, cuts in [(1, []), (3, [0.4]), (8, [0.1, 0.7])]
    ]
    assert all(np.array_equal(results[0], other) for other in results[1:])
    if not act:
        close(results[0], a.astype(np.float64) @ b + c + given[3])


def test_infinities_and_nan_stay_where_they_are() -> None:
    a, b = random(1, (20, 9), "float32"), random(2, (9, 21), "float32")
    a[3, 2], a[5, 1] = np.nan, np.inf
    (got,) = run_node("MatMul", [a, b], [(20, 21)], constant=[1])
    assert np.isnan(got[3]).all()
    assert np.isinf(got[5]).all()
    rest = np.delete(got, [3, 5], 0)
    assert np.isfinite(rest).all()


@pytest.mark.parametrize("sizes", [(5, 7, 9), (1, 3, 40), (13, 4, 1)])
@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_gemm_with_a_computed_c(sizes: tuple[int, int, int], beta: float) -> None:
    rows, depth, columns = sizes
    generator = np.random.default_rng(rows)
    for shape in ((columns,), (1, columns), (rows, 1), (rows, columns), (1,), (1, 1), ()):
        a, b, c = (generator.standard_normal(s) for s in ((rows, depth), (depth, columns), shape))
        x, extra = sg.input("x", a.shape, "float64"), sg.input("c", c.shape, "float64")
        product = ops.Gemm(x, sg.parameter("w", b), extra, alpha=0.7, beta=beta)
        graph = sg.Graph([x, extra], [product])
        assert set(sg.Core().query_model(graph, "CPU").values()) == {"CPU"}
        got = sg.compile_model(graph, "CPU")([a, np.asarray(c)])[0]
        np.testing.assert_allclose(got, 0.7 * (a @ b) + beta * c, rtol=1e-12, atol=1e-12)


def test_a_product_over_nothing_has_the_shape_of_any_other() -> None:
    """ONNX Runtime 1.31 leaves the batch of the second factor out."""
    x = sg.input("x", (2, 0, 4))
    graph = sg.Graph([x], [ops.MatMul(sg.parameter("w", np.zeros((1, 1, 0), np.float32)), x)])
    array = np.zeros((2, 0, 4), np.float32)
    for device in ("CPU", "REFERENCE"):
        got = sg.compile_model(graph, device)(x=array)[0]
        np.testing.assert_array_equal(got, np.zeros((2, 1, 4), np.float32))

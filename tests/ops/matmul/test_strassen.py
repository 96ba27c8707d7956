"""Strassen's products against float64 NumPy: rests of rows, passes, epilogues, unlike rows."""

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
from subgraph.ops.matmul import cpu as gemm_cpu
from subgraph.ops.shared.tile_planning import direct_tiles
from tests.support.kernels import run_node

TILES = direct_tiles("float32")
PAIR, STEPS = 2 * TILES.width, 2 * TILES.lanes


def random(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def relative(got: Array, wanted: Array) -> float:
    return float(np.abs(got - wanted).max() / np.abs(wanted).max())


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every product that its tiles can cut run by Strassen's."""
    monkeypatch.setattr(gemm_cpu, "is_faster", lambda *sizes: True)


def product(
    a: Array, b: Array, c: Array | None = None, residual: Array | None = None, **how: Any
) -> Array:
    act = {"activation": how.pop("act")} if "act" in how else {}
    inputs = [a, b, c, residual]
    (got,) = run_node(
        "FusedMatMul",
        inputs,
        [(len(a), b.shape[1])],
        act,
        domain=INTERNAL_DOMAIN,
        constant=[1, 2],
        **how,
    )
    return got


@pytest.mark.usefixtures("always")
@settings(max_examples=30, deadline=None)
@given(
    m=st.one_of(st.integers(1, 70), st.integers(250, 530)),
    pairs=st.integers(1, 4),
    steps=st.integers(1, 40),
    bias=st.booleans(),
    residual=st.booleans(),
    act=st.sampled_from(["", "Relu", "Gelu"]),
    threads=st.integers(1, 3),
    cuts=st.lists(st.floats(0, 1), max_size=3),
)
def test_products(
    m: int,
    pairs: int,
    steps: int,
    bias: bool,
    residual: bool,
    act: str,
    threads: int,
    cuts: list[float],
) -> None:
    n, k = pairs * PAIR, steps * STEPS
    a, b = random(1, m, k), random(2, k, n)
    c = random(3, n) if bias else None
    r = random(4, m, n) if residual else None
    wanted = a.astype(np.float64) @ b + (0 if c is None else c) + (0 if r is None else r)
    linear = product(a, b, c, r, threads=threads, cuts=cuts)
    assert relative(linear, wanted) < 3e-6
    if act:
        got = product(a, b, c, r, act=act, threads=threads, cuts=cuts)
        # By what the same activation makes of plain products.
        plain = product(a, b, c, r, act=act, options={"STRASSEN": False})
        assert relative(got, plain) < 6e-6


def test_error_is_as_stated() -> None:
    if TILES.lanes < 16:
        pytest.skip("products on narrower tiles run by the definition")
    a, b = random(1, 128, 768), random(2, 768, 1536)
    wanted = a.astype(np.float64) @ b
    assert relative(product(a, b), wanted) < 2e-6
    plain = product(a, b, options={"STRASSEN": False})
    assert relative(plain, wanted) < 2e-6
    assert not np.array_equal(product(a, b), plain)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("m", [64, 65])
@pytest.mark.parametrize("value", [np.inf, np.nan, 1e12, 0.0])
def test_rows_keep_their_errors_to_themselves(value: float, m: int) -> None:
    a, b = random(1, m, 384), random(2, 384, PAIR)
    a[3] *= value
    with np.errstate(invalid="ignore"):
        wanted = a.astype(np.float64) @ b
    got = product(a, b)
    for row, exact in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.isfinite(row), np.isfinite(exact))
        scale = np.abs(np.nan_to_num(exact)).max()
        assert np.abs(np.nan_to_num(row) - np.nan_to_num(exact)).max() <= 3e-6 * scale


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("value", [np.inf, np.nan, 1e12, 1e-9, 0.0])
def test_columns_keep_their_errors_to_themselves(value: float) -> None:
    a, b = random(1, 64, 384), random(2, 384, 3 * PAIR)
    b[:, 5] *= value
    b[7, PAIR + 3] *= value
    with np.errstate(invalid="ignore"):
        wanted = a.astype(np.float64) @ b
    for column, exact in zip(product(a, b).T, wanted.T, strict=True):
        np.testing.assert_array_equal(np.isfinite(column), np.isfinite(exact))
        finite = np.isfinite(exact)
        if finite.any():
            scale = np.abs(exact[finite]).max()
            assert np.abs(column[finite] - exact[finite]).max() <= 3e-6 * scale


def test_columns_are_looked_at_anew_when_weights_change() -> None:
    a, b = random(1, 128, 768), random(2, 768, 768)
    weight = sg.parameter("b", b)
    x = sg.input("x", shape=a.shape, dtype="float32")
    model = sg.compile_model(sg.Graph([x], [ops.MatMul(x, weight)]), "CPU")
    assert relative(model([a])[0], a.astype(np.float64) @ b) < 2e-6
    b[:, 3] = np.nan
    next(iter(model.parameters.values())).assign(b)
    got = model([a])[0]
    assert np.isnan(got[:, 3]).all()
    assert np.isfinite(np.delete(got, 3, axis=1)).all()


@pytest.mark.usefixtures("always")
def test_small_rows_beside_larger_ones() -> None:
    a, b = random(1, 64, 768), random(2, 768, PAIR)
    a[32:] *= 6
    wanted = a.astype(np.float64) @ b
    got = product(a, b)
    for row, exact in zip(got, wanted, strict=True):
        assert relative(row, exact) < 1e-5


@pytest.mark.usefixtures("always")
def test_same_bits_for_every_number_of_threads() -> None:
    a, b, c = random(1, 300, 832), random(2, 832, 5 * PAIR), random(3, 5 * PAIR)
    alone = product(a, b, c, act="Gelu", threads=1)
    for threads in (2, 3, 8):
        assert np.array_equal(product(a, b, c, act="Gelu", threads=threads, cuts=[0.4]), alone)


def test_can_be_forbidden() -> None:
    a, b = random(1, 128, 768), random(2, 768, 768)
    graph = sg.Graph(
        inputs=[x := sg.input("x", shape=a.shape, dtype="float32")],
        outputs=[ops.MatMul(x, sg.parameter("b", b))],
    )
    got = sg.compile_model(graph, "CPU", {"STRASSEN": False})([a])[0]
    assert np.array_equal(got, product(a, b, options={"STRASSEN": False}))

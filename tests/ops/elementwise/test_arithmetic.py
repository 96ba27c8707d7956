"""Division, remainders, powers and Mish on the CPU device: against Python's and NumPy's numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from tests.support.agreement import result_of

_ODD = [
    *(0, -0.0, 1, -1, 2, 3, -3, 0.5, math.inf, -math.inf, math.nan, 1e30, -1e30, 1e-40, 1e-45),
    *(5.5, 2**22, 2**28, 2**29, 7e8, 16777215),
]


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
@pytest.mark.parametrize("most", [10, 2**50, 2**51, 2**52, 2**62])
def test_division_of_64_bits(dtype: str, most: int) -> None:
    """As float64 while all numbers of a vector are small, exactly beyond."""
    rng, signed = np.random.default_rng(most), dtype == "int64"
    a = rng.integers(-most if signed else 0, most, 203).astype(dtype)
    b = rng.integers(-most if signed else 0, most, 203).astype(dtype)
    b[100:] = rng.integers(1, 50, 103)
    a[50:52], b[50:54] = a[50:52] % 5, [0, 1, most - 1, 3]
    a[60:62] = [most - 1, np.iinfo(dtype).max]
    a[62:64], b[62:64] = (-(2**51) if signed else 2**51), [1, 7]
    if signed:
        a[64], b[64:66] = -(2**63), -1
    pairs = [(int(p), int(q)) for p, q in zip(a, b, strict=True)]
    towards_zero = [
        0 if not q else abs(p) // abs(q) * (1 if (p < 0) == (q < 0) else -1) for p, q in pairs
    ]
    wrapped = np.array([n % 2**64 for n in towards_zero], np.uint64).astype(dtype)
    np.testing.assert_array_equal(result_of(ops.Div, a, b), wrapped)
    whole = np.flatnonzero(b)
    rests = np.array([p % q for p, q in pairs if q], dtype)
    np.testing.assert_array_equal(result_of(ops.Mod, a, b)[whole], rests)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
@pytest.mark.parametrize("held", [False, True])
def test_division_by_one_number(dtype: str, held: bool) -> None:
    """By a product with its reciprocal: multiples, and what lies beside them, are the corners."""
    info, rng = np.iinfo(dtype), np.random.default_rng(0)
    few = [2, 3, 7, 10, 100, 127, info.max, info.max - 1, 641, 65537, 2**31 - 1, -1, -2, -7, 0, 1]
    for divisor in [n for n in (*few, info.min) if info.min <= n <= info.max]:
        times = rng.integers(info.min // max(abs(divisor), 1), info.max // max(abs(divisor), 1), 70)
        near = (times[:, None] * divisor + [-1, 0, 1]).reshape(-1)
        ends = [info.min, info.min + 1, info.max - 1, info.max]
        a = np.concatenate([near, ends]).clip(info.min, info.max).astype(dtype)
        b = np.array(divisor, dtype)
        rows = [int(p) for p in a]
        sign = [1 if (p < 0) == (divisor < 0) else -1 for p in rows]
        exact = [divisor and abs(p) // abs(divisor) * s for p, s in zip(rows, sign, strict=True)]
        wanted = np.array(exact).astype(dtype)
        y = sg.input("a", a.shape, dtype)
        other = sg.parameter("b", b) if held else sg.input("b", (), dtype)
        inputs = [y] if held else [y, other]
        graph = sg.Graph(inputs, [ops.Div(y, other), ops.Mod(y, other)])
        found = sg.compile_model(graph, "CPU")([a] if held else [a, b])
        np.testing.assert_array_equal(found[0], wanted)
        if divisor:
            np.testing.assert_array_equal(found[1], np.array([p % divisor for p in rows], dtype))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_remainders_of_floats(dtype: str) -> None:
    rng = np.random.default_rng(0)
    with np.errstate(all="ignore"):
        odd = np.meshgrid(np.array(_ODD, dtype), np.array(_ODD, dtype))
        wide = rng.normal(size=5000) * 10 ** rng.uniform(-3, 8, 5000)
        tenths = rng.integers(1, 500, 5000) * 0.1
        cases = [(odd[0].ravel(), odd[1].ravel()), (wide, rng.normal(size=5000))]
        cases += [(tenths, np.full(5000, 0.1)), (rng.integers(-99, 99, 5000), np.full(5000, 7))]
        for x, y in cases:
            a, b = x.astype(dtype), y.astype(dtype)
            got, want = result_of(ops.Mod, a, b, fmod=1), np.fmod(a, b)
            np.testing.assert_array_equal(got, want)
            real = ~np.isnan(want)
            np.testing.assert_array_equal(np.signbit(got[real]), np.signbit(want[real]))


@pytest.mark.parametrize("exponent", [4.0, -2.0])
def test_powers_by_products(exponent: float) -> None:
    with np.errstate(all="ignore"):
        x = np.array([*_ODD, *np.linspace(-9, 9, 1001)], np.float32)
        want = np.power(x.astype(np.float64), exponent).astype(np.float32)
    got = result_of(ops.Pow, x, np.full(x.shape, exponent, np.float32))
    np.testing.assert_allclose(got, want, rtol=3e-7, atol=2e-45)


_LARGE = [2**24 + 1, 2**24 + 2, 2**25 + 1, -(2**24) - 1, 2**30 + 1, 2, 3, -1, 0, 5, -7]


@pytest.mark.parametrize("device", ["CPU", "OPENCL", "REFERENCE"])
@pytest.mark.parametrize("dtype", ["int32", "int64", "float64"])
@pytest.mark.parametrize("base", ["float32", "float64", "float16"])
def test_exponents_that_float32_does_not_hold(device: str, dtype: str, base: str) -> None:
    """A number beyond 2**24 that is odd stays odd: the sign of the power depends on it."""
    if device not in sg.Core().available_devices:
        pytest.skip(f"no device {device}")
    numbers = [-1, 1, -1 - 2**-20, -1 + 2**-20, -0.0, 0, -2, 0.5, *(math.inf, -math.inf, math.nan)]
    x, y = np.meshgrid(np.array(numbers, base), np.array(_LARGE, dtype))
    with np.errstate(all="ignore"):
        want = np.power(x.astype(np.float64), y).astype(base)
    got = result_of(ops.Pow, x, y, device=device)
    np.testing.assert_allclose(got, want, rtol=3e-7 if base == "float32" else 1e-13)
    np.testing.assert_array_equal(
        np.signbit(got)[~np.isnan(want)], np.signbit(want[~np.isnan(want)])
    )


@pytest.mark.parametrize("device", ["CPU", "OPENCL", "REFERENCE"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_power_of_a_half_is_no_square_root(device: str, dtype: str) -> None:
    """As IEEE 754 and C say: of -0 it is 0, of minus infinity it is infinity."""
    if device not in sg.Core().available_devices:
        pytest.skip(f"no device {device}")
    x = np.array([-0.0, -math.inf, 0, math.inf, 4, -4, math.nan], dtype)
    want = np.array([math.pow(n, 0.5) if n != -4 else math.nan for n in x.tolist()], dtype)
    got = result_of(ops.Pow, x, np.array([0.5], dtype), device=device)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got[:5]), np.signbit(want[:5]))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_mish(dtype: str) -> None:
    x = np.array([*np.linspace(-30, 60, 3001), *_ODD, -100], dtype)
    with np.errstate(all="ignore"):
        wide = x.astype(np.longdouble)
        n = np.exp(np.minimum(wide, 99)) * (np.exp(np.minimum(wide, 99)) + 2)
        want = wide * (n / (n + 2))
    np.testing.assert_allclose(result_of(ops.Mish, x), want.astype(dtype), rtol=1e-6, atol=1e-43)

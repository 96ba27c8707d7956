"""Every vector operation against NumPy, for dtypes, lane counts and instruction sets."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from subgraph.engine.program.pool import call
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.types import Array
from subgraph.system import host

FLOATS = ("float32", "float64")
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
LANES = (1, 4, 8, 16, 32)  # 32 doubles are wider than any register


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[3]), *sys.path])


def run(factory: str, arrays: list[Array], units: int = 0, **variant: Any) -> None:
    words = np.array([a.ctypes.data for a in arrays], np.int64)
    call(
        Kernel("tests.support.engine.kernels", factory, **variant).address,
        words.ctypes.data,
        0,
        units,
        0,
    )


def operands(dtype: str, lanes: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(lanes)
    if dtype in FLOATS:
        a, b = (rng.normal(0, 3, lanes).astype(dtype) for _ in range(2))
        special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, 2.5, -2.5], dtype)
        a[: len(special)] = special[:lanes]
        b[-4:] = special[1:5][:lanes]
    else:
        info = np.iinfo(dtype)
        a, b = (rng.integers(info.min, info.max, lanes, dtype, endpoint=True) for _ in range(2))
        b[lanes // 2 :] = a[lanes // 2 :]
        a[0] = info.min
    return a, b


def check(got: Array, want: list[Array]) -> None:
    for row, expected in enumerate(want):
        np.testing.assert_array_equal(got[row], expected, err_msg=f"row {row}")


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_arithmetic(dtype: str, lanes: int) -> None:
    a, b = operands(dtype, lanes)
    out = np.zeros((21, lanes), dtype)
    run("arithmetic", [a, b, out], dtype=dtype, lanes=lanes)
    zero = np.zeros_like(a)
    last = a.copy()
    last[-1] = b[0]
    with np.errstate(all="ignore"):
        want = [
            a + b,
            a - b,
            a * b,
            np.where(a < b, a, b),
            np.where(a > b, a, b),
            np.minimum(a, b),
            np.maximum(a, b),
            np.where(a < b, a, b),
            np.where(a <= b, a, b),
            np.where(a > b, a, b),
            np.where(a >= b, a, b),
            np.where(a == b, a, zero),
            np.where(a != b, a, zero),
            np.abs(a),
            -a,
            np.full_like(a, 3),
            np.arange(lanes).astype(dtype),
            np.full_like(a, a[0]),
            np.where((a < b) | ~(a <= b), a, zero),
            np.where((a < b) & (a != b) ^ (a == b), a, b),
            last,
        ]
    check(out, want)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_float_operations(dtype: str, lanes: int) -> None:
    a, b = operands(dtype, lanes)
    out = np.zeros((10, lanes), dtype)
    run("floats", [a, b, out], dtype=dtype, lanes=lanes)
    with np.errstate(all="ignore"):
        check(out[:1], [a / b])
        wide = a.astype(np.longdouble) * b.astype(np.longdouble) + a.astype(np.longdouble)
        np.testing.assert_allclose(
            out[1], wide.astype(dtype), rtol=4 * float(np.finfo(dtype).eps), atol=1e-6
        )
        check(
            out[2:],
            [
                np.sqrt(a),
                np.floor(a),
                np.ceil(a),
                np.trunc(a),
                np.rint(a),
                np.copysign(a, b),
                np.where(np.isnan(a), np.zeros_like(a), a),
                a,
            ],
        )


@pytest.mark.parametrize("lanes", [1, 8, 32])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_integer_operations(dtype: str, lanes: int) -> None:
    a, b = operands(dtype, lanes)
    out = np.zeros((6, lanes), dtype)
    run("integers", [a, b, out], dtype=dtype, lanes=lanes)
    check(
        out, [a & b, a | b, a ^ b, ~a, a << np.dtype(dtype).type(2), a >> np.dtype(dtype).type(2)]
    )


def folded(a: Array, combine: Any) -> Any:
    """Combine the halves of an array until one element is left: the documented order."""
    while a.size > 1:
        a = combine(a[: a.size // 2], a[a.size // 2 :])
    return a[0]


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "uint8"])
def test_reductions_have_a_fixed_order(dtype: str, lanes: int) -> None:
    a = np.random.default_rng(lanes).uniform(1, 9, lanes).astype(dtype)
    out = np.zeros(4, dtype)
    run("reductions", [a, out], dtype=dtype, lanes=lanes)
    with np.errstate(all="ignore"):
        want = [folded(a, np.add), folded(a, np.multiply), a.max(), a.min()]
    np.testing.assert_array_equal(out, np.array(want, dtype))


def test_maximum_propagates_nan() -> None:
    a = np.array([1, np.nan, 3, 2], np.float32)
    out = np.zeros(4, np.float32)
    run("reductions", [a, out], dtype="float32", lanes=4)
    assert np.isnan(out).all()


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "int64", "uint16"])
def test_masked_operations_touch_only_their_lanes(dtype: str, lanes: int) -> None:
    rng = np.random.default_rng(5)
    for n in sorted({0, 1, lanes // 2, lanes - 1, lanes, lanes + 3}):
        first = min(n, lanes)
        a = rng.integers(0, 100, lanes).astype(dtype)
        index = rng.integers(0, lanes, lanes).astype(np.int32)
        out = np.full((3, lanes), 77, dtype)
        flags = np.full(2, -1, np.int64)
        run("masked", [a, index, out, flags], n, dtype=dtype, lanes=lanes)
        want = np.full((3, lanes), 77, dtype)
        want[:, :first] = [a[:first], a[:first], a[index[:first]]]
        np.testing.assert_array_equal(out, want)
        assert flags.tolist() == [int(first > 0), int(first == lanes)]


def test_masked_load_reads_no_further() -> None:
    """The first lanes end at the end of a page; the next page cannot be read."""
    import ctypes
    import mmap

    if not sys.platform.startswith("linux"):
        pytest.skip("uses mprotect")
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    view = np.frombuffer(memory, np.float32)
    base = view.ctypes.data
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(base + page), page, 0) == 0
    view[page // 4 - 5 : page // 4] = [1, 2, 3, 4, 5]
    out = np.zeros((3, 16), np.float32)
    index, flags = np.arange(16, dtype=np.int32), np.zeros(2, np.int64)
    words = np.array(
        [base + page - 20, index.ctypes.data, out.ctypes.data, flags.ctypes.data], np.int64
    )
    kernel = Kernel("tests.support.engine.kernels", "masked", dtype="float32", lanes=16)
    call(kernel.address, words.ctypes.data, 0, 5, 0)
    np.testing.assert_array_equal(out[:, :5], [[1, 2, 3, 4, 5]] * 3)
    assert libc.mprotect(ctypes.c_void_p(base + page), page, 3) == 0


PAIRS = [
    ("float32", "float64"),
    ("float64", "float32"),
    ("float32", "int32"),
    ("float64", "int64"),
    ("float32", "uint8"),
    ("int32", "float32"),
    ("uint32", "float64"),
    ("int64", "float32"),
    ("int8", "int32"),
    ("uint8", "int32"),
    ("int64", "int8"),
    ("int32", "uint32"),
]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_conversions(source: str, target: str) -> None:
    a = np.array([0, 1, 2, 100, 3, 5, 7, 99], source)
    if source in FLOATS:
        a = a + np.array(0.75, source)
        a[0] = 0
    elif not source.startswith("uint") and not target.startswith("uint"):
        a[1:4] = -a[1:4]
    out = np.zeros(8, target)
    run("conversion", [a, out], source=source, target=target, lanes=8, saturate=False)
    np.testing.assert_array_equal(out, a.astype(target))


@pytest.mark.parametrize("target", ["int8", "uint8", "int32"])
def test_saturating_conversions(target: str) -> None:
    a = np.array([0, -1, 1e20, -1e20, np.nan, np.inf, -np.inf, 100.9], np.float32)
    out = np.zeros(8, target)
    run("conversion", [a, out], source="float32", target=target, lanes=8, saturate=True)
    info = np.iinfo(target)
    want = [0, max(-1, info.min), info.max, info.min, 0, info.max, info.min, 100]
    assert out.tolist() == want


def bfloat16(a: Array) -> Array:
    """Round float32 to bfloat16, to nearest even, and return it as float32."""
    bits = a.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) & np.uint64(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("lanes", [1, 8, 16])
def test_half_floats_in_memory(lanes: int) -> None:
    values = np.linspace(-70000, 70000, lanes).astype(np.float32)
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    wide, back = np.zeros(lanes, np.float32), np.zeros(lanes, np.float16)
    run("storage", [half, wide, back], stored="float16", dtype="float32", lanes=lanes)
    np.testing.assert_array_equal(wide, half.astype(np.float32))
    np.testing.assert_array_equal(back, half)
    brain = (bfloat16(values).view(np.uint32) >> 16).astype(np.uint16)
    brain_back = np.zeros(lanes, np.uint16)
    run("storage", [brain, wide, brain_back], stored="bfloat16", dtype="float32", lanes=lanes)
    np.testing.assert_array_equal(wide, bfloat16(values))
    np.testing.assert_array_equal(brain_back, brain)


def test_bfloat16_rounds_to_even_and_keeps_nan() -> None:
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, np.nan, -np.inf, 3e38, 1e-40, 0], np.float32)
    out, stored = np.zeros(8, np.float32), np.zeros(8, np.uint16)
    # Values of float32; only the conversion below rounds them to bfloat16.
    run("round_trip", [values, out, stored], lanes=8)
    np.testing.assert_array_equal(out[:3], bfloat16(values[:3]))
    assert np.isnan(out[3])
    np.testing.assert_array_equal(out[4:], bfloat16(values[4:]))


@pytest.mark.parametrize("stored", ["bool", "uint8", "int8", "int16", "int64", "float64"])
def test_storage_in_other_dtypes(stored: str) -> None:
    a = np.array([0, 1, 1, 0, 1, 0, 0, 1]).astype(stored)
    wide, back = np.zeros(8, np.float32), np.zeros_like(a)
    run("storage", [a, wide, back], stored=stored, dtype="float32", lanes=8)
    np.testing.assert_array_equal(wide, a.astype(np.float32))
    np.testing.assert_array_equal(back, a)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, "bool"])
def test_scalars_in_memory(dtype: str) -> None:
    a = np.random.default_rng(0).integers(0, 2, 9).astype(dtype)
    out = np.zeros_like(a)
    run("scalars", [a, out], 9, dtype=dtype)
    np.testing.assert_array_equal(out, a)


def test_memory_and_atomics() -> None:
    cell, out = np.array([10], np.int64), np.zeros(9, np.int64)
    words = np.array([cell.ctypes.data, out.ctypes.data, 0], np.int64)
    words[2:].view(np.float64)[0] = 1.25
    call(Kernel("tests.support.engine.kernels", "memory").address, words.ctypes.data, 0, 0, 0)
    assert out[:7].tolist() == [10, 15, 100, 7, 7, 9, 11]
    assert out[7] == 0x0101010101010101
    assert out[8:].view(np.float64)[0] == 2.5


def test_shuffle_and_streaming_store() -> None:
    memory = np.zeros(64, np.float32)
    skip = (-memory.ctypes.data % 64) // 4
    out = memory[skip : skip + 16]
    a = np.arange(16, dtype=np.float32)
    run("mixed", [a, out], lanes=16)
    np.testing.assert_array_equal(out, a[::-1])


def test_products_are_contracted_only_on_request() -> None:
    if not host.isa().fma:
        pytest.skip("this instruction set has no fused multiply-add")
    x = 1 + 2.0**-30
    for fast, want in ((False, 0.0), (True, 2.0**-60)):
        words = np.array([x, x, -(x * x), -1.0])
        kernel = Kernel("tests.support.engine.kernels", "contracted", fast=fast)
        call(kernel.address, words.ctypes.data, 0, 0, 0)
        assert words[3] == want


@pytest.mark.parametrize("isa", ["", "avx2", "sse", "scalar"])
@pytest.mark.parametrize("lanes", [1, 4, 8, 16, 32, 64])
def test_dot_products_of_bytes_are_exact(
    lanes: int, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isa and isa not in host.available_isas():
        pytest.skip(f"this machine has no {isa}")
    monkeypatch.setenv("SUBGRAPH_ISA", isa)
    rng = np.random.default_rng(lanes)
    a = rng.integers(0, 256, 4 * lanes, np.uint8)
    b = rng.integers(-128, 128, 4 * lanes, np.int8)
    a[:4], b[:4] = 255, -128  # saturates where 16 bits are in between
    sums = rng.integers(-(2**30), 2**30, lanes, np.int32)
    products = (a.astype(np.int32) * b.astype(np.int32)).reshape(lanes, 4)
    want = sums + products.sum(axis=1, dtype=np.int32)
    run("dots", [sums, a, b], lanes=lanes)
    np.testing.assert_array_equal(sums, want)


@pytest.mark.parametrize("isa", ["avx512", "avx2", "avx", "sse", "neon", "scalar"])
def test_each_instruction_set_gives_the_same(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if isa not in host.available_isas():
        pytest.skip(f"this machine has no {isa}")
    monkeypatch.setenv("SUBGRAPH_ISA", isa)
    assert host.isa().name == isa
    lanes = host.lanes("float32")
    assert lanes == max(1, host.isa().vector_bytes // 4)
    for count in {lanes, 16}:
        test_arithmetic("float32", count)
        test_float_operations("float32", count)
        test_reductions_have_a_fixed_order("float32", count)
        test_masked_operations_touch_only_their_lanes("float32", count)
        test_half_floats_in_memory(count)

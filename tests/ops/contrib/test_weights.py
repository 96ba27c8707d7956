"""Weights of few bits in blocks, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph.graph.types import Array
from tests.support.contrib import check, node_model

pytestmark = pytest.mark.filterwarnings("ignore")


def packed_weights(rows: int, depth: int, bits: int, block: int, seed: int = 0) -> list[Array]:
    """Return packed weights, scales, and packed zero points, as their quantizer makes them."""
    rng, blocks = np.random.default_rng(seed), -(-depth // block)
    packed = rng.integers(0, 256, (rows, blocks, block * bits // 8)).astype(np.uint8)
    scales = rng.uniform(0.01, 0.03, (rows, blocks)).astype(np.float32)
    zeros = rng.integers(0, 256, (rows, -(-blocks * bits // 8))).astype(np.uint8)
    return [packed, scales, zeros]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("depth", "block"), [(64, 16), (96, 32), (70, 32)])
@pytest.mark.parametrize("zero", [None, "bytes", "floats"])
def test_product(bits: int, depth: int, block: int, zero: str | None) -> None:
    packed, scales, zeros = packed_weights(24, depth, bits, block)
    points: Array | None = zeros if zero == "bytes" else None
    if zero == "floats":
        points = np.random.default_rng(5).uniform(0, 1 << bits, scales.shape).astype(np.float32)
    a = np.random.default_rng(1).standard_normal((2, 3, depth)).astype(np.float32)
    form: dict[str, Any] = {"N": 24, "K": depth, "bits": bits, "block_size": block}
    form |= {"rtol": 1e-3, "atol": 1e-3}
    if (zero == "floats" and bits != 4) or (bits == 2 and depth % block):  # has no kernel there
        form["expected"] = [a @ floats(packed, scales, points, bits, depth)]
    inputs = [a, packed, scales, points]
    check("MatMulNBits", inputs, constants=[1, 2, 3], **form)
    if "expected" not in form and zero is None:
        bias = np.random.default_rng(2).standard_normal(24).astype(np.float32)
        check("MatMulNBits", [*inputs, None, bias], constants=[1, 2, 3, 5], **form)
        flat = [a[0], packed, scales.reshape(-1)]
        if bits == 4:
            check("MatMulNBits", flat, constants=[1, 2], **form)


def floats(packed: Array, scales: Array, zeros: Array | None, bits: int, depth: int) -> Array:
    """Return the weights as NumPy unpacks them, transposed."""
    rows, blocks = scales.shape

    def numbers(of: Array) -> Array:
        bits_of_row = np.unpackbits(of.reshape(rows, -1), axis=1, bitorder="little")
        parts = bits_of_row.reshape(rows, -1, bits)
        return (parts << np.arange(bits)).sum(-1).astype(np.float32)

    centre = np.full((rows, blocks), 1 << (bits - 1), np.float32) if zeros is None else zeros
    if centre.dtype == np.uint8:
        centre = numbers(centre)[:, :blocks]
    weights = (numbers(packed).reshape(rows, blocks, -1) - centre[..., None]) * scales[..., None]
    return np.ascontiguousarray(weights.reshape(rows, -1)[:, :depth].T)


def test_groups_in_any_order() -> None:
    packed, scales, _ = packed_weights(24, 64, 4, 16)
    a = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    groups = np.random.default_rng(2).integers(0, 4, 64).astype(np.int32)
    numbers = floats(packed, np.ones_like(scales), None, 4, 64)
    want = a @ (numbers * scales[:, groups].T)
    form: dict[str, Any] = {"N": 24, "K": 64, "bits": 4, "block_size": 16, "rtol": 1e-3}
    inputs = [a, packed, scales, None, groups]
    check("MatMulNBits", inputs, constants=[1, 2, 4], atol=1e-3, expected=[want], **form)


def test_weights_are_unpacked_once() -> None:
    packed, scales, zeros = packed_weights(24, 64, 4, 16)
    a = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    form: dict[str, Any] = {"N": 24, "K": 64, "bits": 4, "block_size": 16}
    model = node_model("MatMulNBits", [a, packed, scales, zeros], constants=[1, 2, 3], **form)
    compiled = sg.compile_model(sg.load(model), "CPU", {"ENABLE_PROFILING": True})
    request = compiled.create_infer_request()
    request.infer({"x0": a})
    assert len([entry for entry in request.profile() if entry.device == "CPU"]) == 1
    assert not [entry for entry in request.profile() if entry.device == "REFERENCE"]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("indices", [(3,), (2, 3), (0,)])
@pytest.mark.parametrize("depth", [64, 48])  # an odd number of blocks leaves half a byte unused
def test_rows_of_a_table(depth: int, bits: int, zero: bool, indices: tuple[int, ...]) -> None:
    packed, scales, zeros = packed_weights(20, depth, bits, 16)
    rows = np.random.default_rng(3).integers(0, 20, indices)
    inputs = [packed.reshape(20, -1), rows, scales, zeros if zero else None]
    form: dict[str, Any] = {"bits": bits, "block_size": 16, "constants": [0, 2, 3]}
    check("GatherBlockQuantized", inputs, **form)


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize(("rows", "depth", "width"), [(6, 32, 16), (5, 21, 64), (3, 3, 16)])
def test_matmul_bnb4(rows: int, depth: int, width: int, kind: int) -> None:
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, -(-rows * depth // 2)).astype(np.uint8)
    scales = rng.random(-(-rows * depth // width)).astype(np.float32)
    sizes: dict[str, Any] = {"K": depth, "N": rows, "block_size": width, "quant_type": kind}
    a = np.stack([np.eye(depth), rng.standard_normal((depth, depth))]).astype(np.float32)
    transposed = check("MatMulBnb4", [a, packed, scales], constants=[1, 2], **sizes)[0][0]
    # ONNX Runtime's CPU kernel does not do what its documentation says about transB=0.
    a = rng.standard_normal((2, rows)).astype(np.float32)
    inputs, expected = [a, packed, scales], [a @ transposed.T]
    check("MatMulBnb4", inputs, constants=[1, 2], expected=expected, transB=0, **sizes)

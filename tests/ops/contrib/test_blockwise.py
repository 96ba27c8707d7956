"""Products whose weights stay packed on CPU, against NumPy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph.graph.types import Array, numpy_dtype
from subgraph.system import host
from tests.support.contrib import node_model

from .test_weights import floats, packed_weights

FEW = settings(max_examples=25, deadline=None)


def product_model(
    a: Array, packed: Array, scales: Array, zeros: Array | None, bias: Array | None, **form: Any
) -> sg.Graph:
    """Return a model of one MatMulNBits, whose rows of A have a symbolic number."""
    inputs = [a, packed, scales, zeros, None, bias]
    model = node_model("MatMulNBits", inputs, constants=[1, 2, 3, 5], **form)
    return sg.load(model)


def kernels_of(model: sg.CompiledModel, a: Array) -> tuple[Array, list[str]]:
    request = model.create_infer_request()
    result = next(iter(request.infer({"x0": a}).values()))
    names = [entry.kernel.partition("(")[0].rpartition(".")[2] for entry in request.profile()]
    return result, names


def steps_of_bytes(a: Array, block: int) -> Array:
    """Return for each element the scale of its block: the largest absolute value by 127."""
    firsts = np.arange(0, a.shape[-1], block)
    largest = np.maximum.reduceat(np.abs(a), firsts, axis=-1)
    return np.asarray(np.repeat(largest, block, -1)[..., : a.shape[-1]] / 127)


@FEW
@given(
    bits=st.sampled_from([2, 4, 8]),
    block=st.sampled_from([16, 32, 64]),
    words=st.integers(1, 20),
    columns=st.integers(1, 70),
    rows=st.sampled_from([1, 2, 3, 4, 5, 7, 9, 33, 40]),
    stacked=st.booleans(),
    zeros=st.booleans(),
    bias=st.booleans(),
    precision=st.sampled_from(["float32", "float32", "bfloat16"]),
    level=st.sampled_from([0, 4]),
    group=st.sampled_from([0, 0, 1, 16, 40]),
    threads=st.integers(1, 2),
    seed=st.integers(0, 1 << 30),
)
def test_products(
    bits: int,
    block: int,
    words: int,
    columns: int,
    rows: int,
    stacked: bool,
    zeros: bool,
    bias: bool,
    precision: str,
    level: int,
    group: int,
    threads: int,
    seed: int,
) -> None:
    rng, depth = np.random.default_rng(seed), words * 32 // bits
    packed, scales, points = packed_weights(columns, depth, bits, block, seed)
    a = rng.standard_normal((2, rows, depth) if stacked else (rows, depth)).astype(np.float32)
    added = rng.standard_normal(columns).astype(np.float32) if bias else None
    chosen = points if zeros else None
    form: dict[str, Any] = {"N": columns, "K": depth, "bits": bits, "block_size": block}
    graph = product_model(a, packed, scales, chosen, added, accuracy_level=level, **form)
    config = {
        "INFERENCE_PRECISION": precision,
        "INFERENCE_NUM_THREADS": threads,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": group,
        "ENABLE_PROFILING": True,
    }
    got, kernels = kernels_of(sg.compile_model(graph, "CPU", config), a)
    few = 2 * rows if stacked else rows
    narrow = precision == "bfloat16" and host.multiplies_bfloat16()
    if level == 4 or group:
        in_bytes = not narrow or few <= 64
        assert ("quantize_rows" in kernels) == in_bytes
        narrow = narrow and not in_bytes
    else:
        in_bytes = False
        assert ("few_rows" in kernels) == (few <= (8 if narrow else 32))
    weights = floats(packed, scales, chosen, bits, depth).astype(np.float64)
    wanted = a @ weights + (0 if added is None else added)
    # The sum of the absolute values of what is added bounds the errors of rounding.
    size = np.abs(a) @ np.abs(weights) + (0 if added is None else np.abs(added)) + 1e-3
    step = (2.1 * 2.0**-8 if narrow else 0) + (depth + 4) * 2.0**-24
    # Half of a step of each element that is rounded to bytes, times its weight.
    together = min(block, 32 if group == 40 else 16) if group else block
    rounding = steps_of_bytes(a, together) / 2 @ np.abs(weights) if in_bytes else 0
    assert (np.abs(got - wanted) <= step * size + rounding).all()


def test_sizes_and_weights_that_change() -> None:
    """One model for few and many rows, before and after its weights were replaced."""
    packed, scales, zeros = packed_weights(40, 64, 4, 32)
    a = np.random.default_rng(1).standard_normal((50, 64)).astype(np.float32)
    form: dict[str, Any] = {"N": 40, "K": 64, "bits": 4, "block_size": 32}
    graph = product_model(a, packed, scales, zeros, None, symbolic=True, **form)
    model = sg.compile_model(graph, "CPU")
    for _ in range(2):
        wanted = a @ floats(packed, scales, zeros, 4, 64)
        for rows in (1, 50, 3):
            got = next(iter(model({"x0": a[:rows]}).values()))
            np.testing.assert_allclose(got, wanted[:rows], rtol=0, atol=1e-4)
        packed, scales = packed[::-1].copy(), scales[::-1].copy()
        for name, array in (("x1", packed), ("x2", scales)):
            graph.parameters[name].assign(array)


def test_strange_numbers_are_not_lost_in_bytes() -> None:
    packed, scales, _ = packed_weights(24, 64, 4, 16)
    a = np.random.default_rng(1).standard_normal((5, 64)).astype(np.float32)
    a[1, 3], a[2, 60], a[3], a[4] = np.nan, np.inf, 0, 1e-44
    form: dict[str, Any] = {"N": 24, "K": 64, "bits": 4, "block_size": 16, "accuracy_level": 4}
    graph = product_model(a, packed, scales, None, None, **form)
    got = next(iter(sg.compile_model(graph, "CPU")({"x0": a}).values()))
    assert np.isfinite(got[[0, 3, 4]]).all()
    assert np.isnan(got[[1, 2]]).all()
    assert not got[3].any()
    assert np.abs(got[4]).max() < 1e-40


@pytest.mark.parametrize("missing", ["B", "scales"])
def test_weights_that_are_computed_run_as_before(missing: str) -> None:
    packed, scales, _ = packed_weights(24, 64, 4, 16)
    a = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    form: dict[str, Any] = {"N": 24, "K": 64, "bits": 4, "block_size": 16}
    constants = [2] if missing == "B" else [1]
    model = sg.load(node_model("MatMulNBits", [a, packed, scales], constants=constants, **form))
    fed = {"x0": a, "x1" if missing == "B" else "x2": packed if missing == "B" else scales}
    got = next(iter(sg.compile_model(model, "CPU")(fed).values()))
    np.testing.assert_allclose(got, a @ floats(packed, scales, None, 4, 64), rtol=0, atol=1e-4)


def test_rows_that_do_not_fit() -> None:
    packed, scales, _ = packed_weights(24, 64, 4, 16)
    a = np.zeros((3, 64), np.float32)
    form: dict[str, Any] = {"N": 24, "K": 64, "bits": 4, "block_size": 16}
    graph = product_model(a, packed, scales, None, None, symbolic=True, **form)
    model = sg.compile_model(graph, "CPU")
    with pytest.raises(sg.ShapeError, match=r"64"):
        model({"x0": np.zeros((3, 60), np.float32)})
    assert next(iter(model({"x0": a}).values())).shape == (3, 24)


@FEW
@given(
    dtype=st.sampled_from(["int4", "uint4", "int8", "uint8"]),
    form=st.sampled_from(["blocks", "blocks", "columns", "rows", "one", "one of rank 1"]),
    block=st.sampled_from([8, 16, 32]),
    blocks=st.integers(1, 5),
    columns=st.integers(1, 40),
    rows=st.sampled_from([1, 3, 40]),
    zeros=st.booleans(),
    axis=st.sampled_from([0, 0, -2, 1]),
    group=st.sampled_from([0, 0, 16]),
    shown=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_products_with_dequantized_weights(
    dtype: str,
    form: str,
    block: int,
    blocks: int,
    columns: int,
    rows: int,
    zeros: bool,
    axis: int,
    group: int,
    shown: bool,
    seed: int,
) -> None:
    """The standard's form; other users of the dequantized weights get them as floats."""
    rng, depth = np.random.default_rng(seed), block * blocks
    least, most = (-8, 8) if "4" in dtype else (-128, 128)
    if dtype.startswith("u"):
        least, most = 0, most - least
    shape: tuple[int, ...] = (depth, columns)
    attributes: dict[str, Any] = {"axis": axis}
    if form == "blocks":
        along = axis % 2
        attributes["block_size"] = block
        if along == 1:
            shape = (columns, depth)
        few: tuple[int, ...] = (blocks, columns) if along == 0 else (columns, blocks)
    else:
        along = 0
        attributes["axis"] = 0 if form == "rows" else -1
        few = {"columns": (columns,), "rows": (depth,), "one": ()}.get(form, (1,))
    numbers = rng.integers(least, most, shape)
    points = rng.integers(least, most, few) if zeros else np.zeros(few, np.int64)
    scales = rng.uniform(0.01, 0.03, few).astype(np.float32)
    kind = getattr(onnx.TensorProto, dtype.upper())
    held = [
        onnx.helper.make_tensor("w", kind, shape, numbers.reshape(-1)),
        onnx.numpy_helper.from_array(scales, "s"),
        *([onnx.helper.make_tensor("z", kind, few, points.reshape(-1))] if zeros else []),
    ]
    nodes = [
        onnx.helper.make_node("DequantizeLinear", [t.name for t in held], ["real"], **attributes),
        onnx.helper.make_node("MatMul", ["x", "real"], ["y"]),
    ]
    x = rng.standard_normal((rows, shape[0])).astype(np.float32)
    ends = [
        onnx.helper.make_tensor_value_info(name, 1, None) for name in ("y", "real")[: 1 + shown]
    ]
    begin = onnx.helper.make_tensor_value_info("x", 1, x.shape)
    model = onnx.helper.make_model(
        onnx.helper.make_graph(nodes, "g", [begin], ends, held),
        opset_imports=[onnx.helper.make_opsetid("", 21)],
        ir_version=10,
    )

    def spread(of: Array) -> Array:
        if form == "blocks":
            return np.repeat(of, block, along)
        return of[:, None] if form == "rows" else of

    real = (numbers - spread(points)) * spread(scales).astype(np.float64)
    config = {"ENABLE_PROFILING": True, "DYNAMIC_QUANTIZATION_GROUP_SIZE": group}
    request = sg.compile_model(sg.load(model), "CPU", config).create_infer_request()
    got = request.infer({"x": x})
    kernels = "".join(entry.kernel for entry in request.profile())
    # Scales of a matrix or column stand for blocks of a power of two of rows.
    rows_of_block = block if form == "blocks" else depth & -depth
    packed = form != "rows" and (form != "blocks" or along == 0) and rows_of_block >= 16
    # A scale of length 1 may be that of the only row, column or block.
    if few not in ((1,), (1, 1)):
        assert ("blockwise" in kernels) == packed
    assert "reference" not in kernels
    step = 2.0**-24 * (len(real) + 4)
    allowed = step * (np.abs(x) @ np.abs(real)) + 1e-9
    if group and "blockwise" in kernels:
        allowed += steps_of_bytes(x, 16) / 2 @ np.abs(real)
    assert (np.abs(got["y"] - x @ real) <= allowed).all()
    if shown:
        np.testing.assert_allclose(got["real"], real, rtol=1e-6)


def test_products_between_conversions_are_of_integers() -> None:
    """Weights of 8 bits whose other operand is dequantized too."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((4, 32)).astype(np.float32)
    held = {
        "w": rng.integers(-128, 128, (32, 24)).astype(np.int8),
        "s": np.float32(0.02),
        "z": np.int8(0),
    }
    nodes = [
        onnx.helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        onnx.helper.make_node("DequantizeLinear", ["q", "s", "z"], ["a"]),
        onnx.helper.make_node("DequantizeLinear", ["w", "s", "z"], ["b"]),
        onnx.helper.make_node("MatMul", ["a", "b"], ["m"]),
        onnx.helper.make_node("QuantizeLinear", ["m", "s", "z"], ["y"]),
    ]
    tensors = [onnx.numpy_helper.from_array(np.asarray(a), name) for name, a in held.items()]
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        nodes, "g", [info("x", 1, x.shape)], [info("y", 3, None)], tensors
    )
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10
    )
    compiled = sg.compile_model(sg.load(model), "CPU", {"ENABLE_PROFILING": True})
    request = compiled.create_infer_request()
    request.infer({"x": x})
    kernels = "".join(entry.kernel for entry in request.profile())
    assert "quantized" in kernels
    assert "blockwise" not in kernels


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rows", [2, 40])
@pytest.mark.parametrize("form", ["MatMulNBits", "DequantizeLinear"])
def test_models_in_half_precision_have_packed_weights_too(form: str, rows: int, dtype: str) -> None:
    """Two products one after the other, whose results are rounded once each."""
    half, rng, size = numpy_dtype(dtype), np.random.default_rng(5), 64
    x = rng.standard_normal((rows, size)).astype(half)
    numbers = rng.integers(-128, 128, (size, size))
    scales = rng.uniform(0.001, 0.003, (size, 2)).astype(half)  # of two blocks of each column
    make = onnx.helper.make_node
    if form == "MatMulNBits":
        weights = {"w": (numbers + 128).astype(np.uint8).reshape(size, 2, 32), "s": scales}
        sizes: dict[str, Any] = {"K": size, "N": size, "bits": 8, "block_size": 32}
        nodes = [
            make(form, [at, "w", "s"], [to], domain="com.microsoft", **sizes)
            for at, to in ("xh", "hy")
        ]
    else:
        weights = {"w": numbers.astype(np.int8).T, "s": scales.T}
        nodes = [make(form, ["w", "s"], ["floats"], axis=0, block_size=32)]
        nodes += [make("MatMul", [at, "floats"], [to]) for at, to in ("xh", "hy")]
    kind = onnx.helper.np_dtype_to_tensor_dtype(half)
    info = onnx.helper.make_tensor_value_info
    held = [onnx.numpy_helper.from_array(np.ascontiguousarray(a), k) for k, a in weights.items()]
    graph = onnx.helper.make_graph(
        nodes, "g", [info("x", kind, x.shape)], [info("y", kind, None)], held
    )
    imports = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=10)
    compiled = sg.compile_model(sg.load(model), "CPU", {"ENABLE_PROFILING": True})
    request = compiled.create_infer_request()
    found = request.infer({"x": x})["y"]
    assert found.dtype == half
    real = (numbers * np.repeat(scales.astype(np.float64), 32, 1)).T
    first = x.astype(np.float64) @ real
    step = float(np.finfo(half).eps if dtype == "float16" else 2.0**-7)
    allowed = step * (np.abs(first) @ np.abs(real) + np.abs(first @ real))
    assert (np.abs(found.astype(np.float64) - first @ real) <= allowed).all()
    kernels = [entry.kernel for entry in request.profile()]
    assert sum("blockwise" in kernel for kernel in kernels) == 2
    assert not any("reference" in kernel for kernel in kernels)

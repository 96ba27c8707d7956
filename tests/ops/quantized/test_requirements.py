"""Quantisation and products of bytes refuse operands that do not fit, on every device."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import subgraph as sg
from subgraph.graph.types import Array
from tests.support.requirements import DEVICES, Use, bytes_of, floats, ints, refused, taken


def scales(*shape: int) -> Array:
    """Return positive scales."""
    return np.full(shape, 0.5, np.float32)


def quantised_product(
    a: Array, b: Array, k: int | None = None, other: Array | None = None
) -> list[Array | None]:
    """Return the operands of QLinearMatMul, the one at a position replaced."""
    zero, one = np.zeros((), np.uint8), scales()
    given: list[Array | None] = [a, one, zero, b, one, zero, one, zero]
    if k is not None:
        given[k] = other
    return given


AQ, BQ = bytes_of(3, 4), bytes_of(4, 5)
WRONG_PRODUCTS = [
    *(
        Use("MatMulInteger", list(given))
        for given in (
            (AQ, bytes_of(3, 5)),
            (AQ, bytes_of(5)),
            (bytes_of(2, 3, 4), bytes_of(3, 4, 5)),
            (AQ, BQ, bytes_of(2)),
            (AQ, BQ, bytes_of(4)),
            (AQ, BQ, bytes_of(0)),
            (AQ, BQ, bytes_of(1, 3)),
            (AQ, BQ, bytes_of(3, dtype="int8")),
            (AQ, BQ, None, bytes_of(4)),
            (AQ, BQ, None, bytes_of(6)),
            (AQ, BQ, None, bytes_of(0)),
            (AQ, BQ, None, bytes_of(5, 1)),
            (AQ, BQ, None, bytes_of(5, dtype="int8")),
            (AQ, BQ, bytes_of(), bytes_of(2, 1, 5)),
        )
    ),
    *(
        Use("QLinearMatMul", quantised_product(AQ, BQ, k, other))
        for k, other in (
            (0, bytes_of(3, 5)),
            (0, bytes_of(4, 3)),
            (1, scales(2)),
            (1, scales(0)),
            (1, scales(1, 3)),
            (4, scales(1, 1)),
            (2, bytes_of(4)),
            (2, bytes_of(2, 1)),
            (2, np.zeros((), np.int8)),
            (3, bytes_of(2, 4, 5)[:, :3]),
            (4, scales(4)),
            (4, scales(5, 1)),
            (5, bytes_of(3)),
            (5, bytes_of(0)),
            (5, np.zeros((), np.int8)),
            (6, scales(5)),
            (6, scales(0)),
            (7, bytes_of(2)),
        )
    ),
]
SCALE, ZERO = scales(1), bytes_of(1)
CONVOLUTION = [bytes_of(2, 6, 7, 8), SCALE, ZERO, bytes_of(9, 6, 3, 2), SCALE, ZERO, SCALE, ZERO]
WRONG_CONVOLUTIONS = [
    Use("ConvInteger", [bytes_of(2, 6, 7, 8), bytes_of(9, 6, 3, 2), bytes_of(6)]),
    Use("ConvInteger", [bytes_of(2, 6, 7, 8), bytes_of(9, 6, 3, 2), bytes_of(1), bytes_of(8)]),
    Use("ConvInteger", [bytes_of(2, 6, 7, 8), bytes_of(9, 5, 3, 2)]),
    *(
        Use("QLinearConv", [*CONVOLUTION[:k], wrong, *CONVOLUTION[k + 1 :]])
        for k, wrong in (
            (1, SCALE.repeat(2)),
            (2, ZERO.repeat(6)),
            (3, bytes_of(9, 5, 3, 2)),
            (4, SCALE.repeat(8)),
            (4, SCALE.repeat(0)),
            (5, ZERO.repeat(10)),
            (6, SCALE.repeat(9)),
            (7, ZERO.repeat(9)),
        )
    ),
    Use("QLinearConv", [*CONVOLUTION, ints(*range(8), dtype="int32")]),
]
X = floats(2, 3, 4)
XQ = bytes_of(2, 3, 4)
QUANTISED = [("QuantizeLinear", X, np.uint8), ("DequantizeLinear", XQ, np.uint8)]
WRONG_SCALES = [
    Use(op, [x, *rest], attributes)
    for op, x, _ in QUANTISED
    for rest, attributes in (
        ([scales(2)], {}),
        ([scales(4)], {}),
        ([scales(0)], {}),
        ([scales(3)], {"axis": 0}),
        ([scales(3)], {"axis": 3}),
        ([scales(3)], {"axis": -4}),
        ([scales(3, 1)], {}),
        ([scales(3), bytes_of(2)], {}),
        ([scales(3), bytes_of(0)], {}),
        ([scales(), bytes_of(2)], {}),
        ([scales(1), bytes_of(4)], {}),
        ([scales(3), bytes_of(3)], {"block_size": -1}),
        ([scales(2, 3, 3)], {"axis": 2, "block_size": 2}),
        ([scales(2, 2, 2)], {"axis": 2, "block_size": 2}),
        ([scales(2, 3, 2), bytes_of(2, 3, 1)], {"axis": 2, "block_size": 2}),
        ([scales(2, 3, 2)], {"axis": 3, "block_size": 2}),
        ([scales(2, 3, 0)], {"axis": 2, "block_size": 2}),
        ([scales(2, 3, 4)], {}),
    )
]
WRONG_SCALES.extend(
    [
        Use("DequantizeLinear", [XQ, scales(), np.zeros((), np.int8)]),
        Use("QuantizeLinear", [X, scales(), np.zeros((), np.int8)], {"output_dtype": 2}),
    ]
)
RIGHT = [
    Use("MatMulInteger", [AQ, BQ, bytes_of(3), bytes_of(5)]),
    Use("MatMulInteger", [bytes_of(2, 3, 4), BQ, bytes_of(2, 3, 1), bytes_of(1)]),
    *(
        Use("QLinearMatMul", quantised_product(AQ, BQ, k, other))
        for k, other in (
            (1, np.array([0.5, 0.25, 2], np.float32)),
            (2, bytes_of(3)),
            (2, bytes_of(3, 1)),
            (4, np.array([0.5, 0.25, 2, 1, 4], np.float32)),
            (5, bytes_of(5)),
            (6, np.array([8, 4, 2], np.float32)),
            (7, bytes_of(3)),
            (3, bytes_of(4)),
        )
    ),
    Use("QLinearMatMul", quantised_product(AQ, bytes_of(4), 1, np.array([0.5, 4, 2], np.float32))),
    Use("QuantizeLinear", [X, scales(4), bytes_of(4)], {"axis": -1}),
    Use("QuantizeLinear", [X, scales(1), bytes_of()], {"axis": 7}),
    Use("DequantizeLinear", [XQ, scales(2, 3, 2), bytes_of(2, 3, 2)], {"axis": 2, "block_size": 2}),
    Use("DequantizeLinear", [XQ, scales(2, 3, 2)], {"axis": 2, "block_size": 3}),
    Use("ConvInteger", [bytes_of(2, 6, 7, 8), bytes_of(9, 6, 3, 2), bytes_of(1), bytes_of(9)]),
]

test_operands_that_do_not_fit_are_refused = refused(
    WRONG_PRODUCTS + WRONG_CONVOLUTIONS + WRONG_SCALES
)


test_operands_that_fit_are_taken = taken(RIGHT)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "ends"), [("uint8", (0, 255)), ("int8", (-128, 127))])
def test_what_lies_beyond_the_range_is_cut_to_it(
    device: str, dtype: str, ends: tuple[int, int]
) -> None:
    x = sg.input("x", ("N",), "float32")
    zero = sg.parameter("zero", np.zeros((), dtype))
    y = sg.ops.QuantizeLinear(x, sg.parameter("scale", scales()), zero)
    far = np.array([np.inf, -np.inf, 1e30, -1e30, 3e9, -3e9, 1.25], np.float32)
    results = sg.compile_model(sg.Graph(inputs=[x], outputs=[y]), device)([far])
    least, most = ends
    np.testing.assert_array_equal(results[0], [most, least, most, least, most, least, 2])


@pytest.mark.parametrize("dtype", [onnx.TensorProto.INT4, onnx.TensorProto.UINT16])
def test_blocks_are_quantised_as_by_onnx(dtype: int) -> None:
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    node = helper.make_node(
        "QuantizeLinear", ["x", "s"], ["y"], axis=1, block_size=2, output_dtype=dtype
    )
    infos = [helper.make_tensor_value_info(n, 1, s) for n, s in (("x", (2, 3)), ("s", (2, 2)))]
    made = [helper.make_tensor_value_info("y", dtype, (2, 3))]
    model = helper.make_model(
        helper.make_graph([node], "blocks", infos, made),
        opset_imports=[helper.make_opsetid("", 23)],
    )
    x, s = floats(2, 3), np.array([[0.25, 0.5], [0.125, 1]], np.float32)
    wanted: Any = ReferenceEvaluator(model).run(None, {"x": x, "s": s})
    found = sg.compile_model(sg.load(model), "REFERENCE")([x, s])["y"]
    np.testing.assert_array_equal(np.asarray(found, np.int32), np.asarray(wanted[0], np.int32))

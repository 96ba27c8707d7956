"""ONNX Runtime's operators refuse operands that do not fit, on every device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph.graph.types import Array
from tests.support.requirements import DEVICES, Use, bytes_of, floats, refused, run, taken


def use(op: str, *inputs: Array | None, outputs: int = 1, **attributes: Any) -> Use:
    """Return a use of one of ONNX Runtime's operators."""
    return Use(op, inputs, attributes, 1, outputs, "com.microsoft")


def whole(*numbers: int, dtype: str = "int32") -> Array:
    """Return whole numbers."""
    return np.array(numbers, dtype)


ONE, ZERO = np.full((), 0.5, np.float32), np.zeros((), np.uint8)
X = floats(2, 3, 8)
XQ = bytes_of(3, 4)
LENGTHS = [np.array([3]), np.array([4])]  # of queries and keys
BIASES = [floats(7), floats(9), floats(1), floats(0), floats(1, 8)]
WRONG_SUMS = [
    *(use(op, X, bias) for op in ("BiasGelu", "FastGelu", "BiasSplitGelu") for bias in BIASES),
    *(use("BiasAdd", X, bias, X) for bias in BIASES),
    *(use("BiasDropout", X, bias) for bias in BIASES),
    use("BiasAdd", X, floats(8), X[:1]),
    use("BiasAdd", X, floats(8), floats(8)),
    use("BiasDropout", X, floats(8), X[:, :1]),
    use("BiasSoftmax", X, floats(2, 3, 7), axis=2, is_inner_broadcast=0),
    use("BiasSoftmax", X[:1], X, axis=2, is_inner_broadcast=0),
    use("GemmFastGelu", floats(3, 8), floats(8, 4), floats(1)),
    use("GemmFastGelu", floats(3, 8), floats(7, 4)),
    use("FusedMatMul", floats(3, 8), floats(7, 4)),
    use("FusedMatMul", floats(3, 8), floats(8, 4), transB=1),
    use("FusedGemm", floats(3, 8), floats(8, 4), floats(5)),
    use("FusedGemm", floats(3, 8), floats(8, 4), floats(3)),
]


def one_replaced(op: str, given: list[Array | None], others: dict[int, list[Array]]) -> list[Use]:
    """Return uses with one operand replaced."""
    return [
        use(op, *given[:k], other, *given[k + 1 :])
        for k, found in others.items()
        for other in found
    ]


SCALES, ZEROS = [np.ones(4, np.float32), np.ones(0, np.float32)], [bytes_of(4), bytes_of(0)]
WRONG_BYTES = [
    *one_replaced(
        "QLinearAdd",
        [XQ, ONE, ZERO, XQ, ONE, ZERO, ONE, ZERO],
        {1: SCALES, 2: ZEROS, 3: [bytes_of(3, 3)], 4: SCALES, 5: ZEROS, 6: SCALES, 7: ZEROS},
    ),
    *one_replaced("QLinearMul", [XQ, ONE, ZERO, XQ, ONE, ZERO, ONE, ZERO], {1: SCALES, 5: ZEROS}),
    *one_replaced(
        "QLinearSigmoid", [XQ, ONE, ZERO, ONE, ZERO], {1: SCALES, 2: ZEROS, 3: SCALES, 4: ZEROS}
    ),
    use("QLinearConcat", ONE, ZERO, XQ, ONE, axis=0),
    use("QLinearConcat", ONE, ZERO, XQ, SCALES[0], ZERO, axis=0),
    use("QLinearConcat", SCALES[0], ZERO, XQ, ONE, ZERO, axis=0),
    *one_replaced(
        "QGemm",
        [XQ, ONE, ZERO, bytes_of(4, 5), ONE, ZERO, whole(1, 2, 3, 4, 5), ONE, ZERO],
        {
            1: SCALES,
            2: ZEROS,
            3: [bytes_of(5, 5)],
            4: [*SCALES, np.ones(3, np.float32)],
            5: ZEROS,
            6: [whole(1, 2, 3, 4), whole()],
            7: SCALES,
            8: ZEROS,
        },
    ),
    *one_replaced(
        "DynamicQuantizeMatMul",
        [floats(3, 4), bytes_of(4, 5), ONE, ZERO, floats(5)],
        {
            0: [floats(3, 5)],
            2: [*SCALES, np.ones((2, 1, 5), np.float32), floats(3, 5)],
            3: ZEROS,
            4: [floats(4), floats(1), floats(0), floats(3, 5)],
        },
    ),
    *one_replaced(
        "MatMulIntegerToFloat",
        [XQ, bytes_of(4, 5), ONE, ONE, ZERO, ZERO, floats(5)],
        {
            2: SCALES,
            3: [*SCALES, floats(3, 5)],
            4: [bytes_of(4)],
            5: ZEROS,
            6: [floats(4), floats(1)],
        },
    ),
]
PACKED: list[Array | None] = [
    *(floats(2, 40), bytes_of(6, 3, 8), floats(6, 3), bytes_of(6, 2)),
    *(whole(*(k // 16 for k in range(40))), floats(6)),
]
SIZES = {"K": 40, "N": 6, "bits": 4, "block_size": 16}


def packed(k: int | None = None, other: Array | None = None, **attributes: int) -> Use:
    """Return a product with weights of few bits, one operand replaced."""
    given = list(PACKED)
    if k is not None:
        given[k] = other
    return Use("MatMulNBits", given, {**SIZES, **attributes}, 1, 1, "com.microsoft")


TABLE = (bytes_of(7, 32), whole(0, 3, 6, dtype="int64"), floats(7, 4), bytes_of(7, 2))


def table(k: int | None = None, other: Array | None = None, **attributes: Any) -> Use:
    """Return rows of a table of few bits, one operand replaced."""
    given: list[Array | None] = list(TABLE)
    if k is not None:
        given[k] = other
    return use("GatherBlockQuantized", *given, **{"block_size": 16, "bits": 4, **attributes})


WRONG_BLOCKS = [
    *(
        packed(k, other)
        for k, other in (
            (0, floats(2, 39)),
            (0, floats(2, 48)),
            (1, bytes_of(6, 3, 7)),
            (1, bytes_of(6, 3, 9)),
            (1, bytes_of(6, 2, 8)),
            (1, bytes_of(5, 3, 8)),
            (1, bytes_of(12, 3, 8)),
            (1, bytes_of(0, 3, 8)),
            (2, floats(6, 2)),
            (2, floats(17)),
            (2, floats(6, 6)),
            (2, floats(0)),
            (3, bytes_of(6, 1)),
            (3, bytes_of(6, 3)),
            (3, bytes_of(0)),
            (4, whole(*(k // 16 for k in range(39)))),
            (4, whole()),
            (5, floats(5)),
            (5, floats(1)),
            (5, floats(0)),
        )
    ),
    *(
        packed(None, None, **attributes)
        for attributes in (
            {"K": 41},
            {"K": 0},
            {"K": -40},
            {"K": 10**9},
            {"K": 2**62},
            {"N": 7},
            {"N": 0},
            {"N": 2**40},
            {"block_size": 0},
            {"block_size": -16},
            {"block_size": 24},
            {"block_size": 32},
            {"block_size": 2**62},
        )
    ),
    *(
        table(k, other)
        for k, other in (
            (0, bytes_of(6, 32)),
            (1, whole(0, 7, dtype="int64")),
            (2, floats(7, 3)),
            (2, floats(7, 5)),
            (2, floats(6, 4)),
            (2, floats(0, 4)),
            (3, bytes_of(7, 1)),
            (3, bytes_of(7, 3)),
            (3, bytes_of(6, 2)),
        )
    ),
    table(block_size=0),
    table(block_size=24),
]
QUERY, KEY = floats(2, 3, 8), floats(2, 5, 8)
HEADS = {"num_heads": 2}


def self_attention(k: int | None = None, other: Array | None = None, **attributes: Any) -> Use:
    """Return a use of Attention, one operand replaced."""
    given: list[Array | None] = [QUERY, floats(8, 24), floats(24), whole(1, 1, 0, 1, 1, 1)]
    given[3] = given[3].reshape(2, 3) if given[3] is not None else None
    given += [None, None]
    if k is not None:
        given[k] = other
    return use("Attention", *given, **{**HEADS, **attributes})


def heads(k: int | None = None, other: Array | None = None, **attributes: Any) -> Use:
    """Return a use of MultiHeadAttention, one operand replaced."""
    given: list[Array | None] = [QUERY, KEY, KEY, floats(24), None, None]
    if k is not None:
        given[k] = other
    return use("MultiHeadAttention", *given, **{**HEADS, **attributes})


CACHES = (floats(2, 2, 9, 4), floats(2, 2, 9, 4))


def group(k: int | None = None, other: Array | None = None, **attributes: Any) -> Use:
    """Return a use of GroupQueryAttention, one operand replaced."""
    ends, total = whole(4, 3), whole(9).reshape(())
    kv = floats(2, 3, 8)
    given: list[Array | None] = [floats(2, 3, 16), kv, kv, *CACHES, ends, total]
    if k is not None:
        given[k] = other
    sizes = {"num_heads": 4, "kv_num_heads": 2, **attributes}
    return use("GroupQueryAttention", *given, outputs=3, **sizes)


WRONG_ATTENTION = [
    *(
        self_attention(k, other)
        for k, other in (
            (0, floats(2, 3, 7)),
            (0, floats(6, 8)),
            (1, floats(7, 24)),
            (1, floats(8, 21)),
            (1, floats(8, 0)),
            (2, floats(23)),
            (2, floats(1)),
            (2, floats(0)),
            (3, whole(1, 1, 1, 1).reshape(2, 2)),
            (3, whole(1, 1, 1).reshape(1, 3)),
            (3, whole(1, 1).reshape(2, 1)),
            (4, floats(2, 2, 2, 5, 3)),
            (4, floats(2, 2, 1, 5, 4)),
            (4, floats(1, 2, 2, 5, 4)),
            (4, floats(3, 2, 2, 5, 4)),
            (4, floats(2, 2, 5, 4)),
            (5, floats(2, 2, 3, 4)),
            (5, floats(2, 2, 2, 3)),
        )
    ),
    *(self_attention(num_heads=count) for count in (0, -2, 3, 2**62)),
    self_attention(qkv_hidden_sizes=(8, 8)),
    self_attention(qkv_hidden_sizes=(8, 8, 9)),
    self_attention(qkv_hidden_sizes=(8, 16, 0)),
    self_attention(qkv_hidden_sizes=(16, 16, -8)),
    *(
        heads(k, other)
        for k, other in (
            (0, floats(2, 3, 6)),
            (0, floats(1, 3, 8)),
            (1, floats(2, 5, 6)),
            (1, floats(2, 4, 8)),
            (1, floats(1, 5, 8)),
            (2, floats(2, 4, 8)),
            (2, floats(2, 5, 7)),
            (2, None),
            (3, floats(23)),
            (3, floats(17)),
            (3, floats(25)),
            (3, floats(0)),
            (4, whole(1, 1, 1, 1).reshape(2, 2)),
            (4, whole(1, 1, 1, 1, 1).reshape(1, 5)),
            (5, floats(2, 2, 3, 4)),
            (5, floats(2, 3, 3, 5)),
        )
    ),
    *(heads(num_heads=count) for count in (0, -2, 3, 2**62)),
    *(
        group(k, other)
        for k, other in (
            (0, floats(2, 3, 15)),
            (0, floats(1, 3, 16)),
            (1, floats(2, 3, 7)),
            (1, floats(2, 4, 8)),
            (1, None),
            (2, floats(2, 2, 8)),
            (3, floats(2, 2, 8, 4)),
            (3, floats(1, 2, 9, 4)),
            (3, floats(2, 1, 9, 4)),
            (3, floats(2, 2, 9, 3)),
            (4, floats(2, 2, 9, 5)),
            (4, None),
            (5, whole(4)),
            (5, whole(4, 3, 2)),
            (5, whole()),
            (6, whole(9, 9)),
        )
    ),
    *(group(num_heads=count) for count in (0, -4, 3, 5)),
    *(group(kv_num_heads=count) for count in (0, -2, 3, 8)),
    group(do_rotary=1),
    use("RotaryEmbedding", X, np.arange(1), floats(9, 2), floats(9, 2), num_heads=1),
    use("RotaryEmbedding", X[None], np.arange(1), floats(9, 2), floats(9, 2)),
    use("RotaryEmbedding", X, np.arange(1), floats(9, 0), floats(9, 0)),
    *(
        use("RelativePositionBias", floats(*shape), *LENGTHS, max_distance=most, **form)
        for shape, most, form in (
            ((1, 4), 8, {}),
            ((3, 4), 8, {"is_bidirectional": 1}),
            ((8, 4), 0, {}),
            ((8, 4), 4, {}),
            ((8,), 9, {}),
        )
    ),
    use("RelativePositionBias", floats(8, 4), np.array([1, 2]), LENGTHS[1], max_distance=9),
    use("Pad", X, np.arange(6).reshape(6, 1)),
    use("GatherND", X, None),
]
RIGHT = [
    use("BiasGelu", X, floats(8)),
    use("BiasDropout", X, floats(8), X),
    use("QLinearAdd", XQ, ONE, ZERO, bytes_of(4), ONE, ZERO, ONE, ZERO),
    use("MatMulIntegerToFloat", XQ, bytes_of(4, 5), ONE, floats(5), ZERO, bytes_of(5), floats(5)),
    packed(),
    packed(4, whole(*(k // 16 for k in range(48)))),
    table(),
    self_attention(),
    self_attention(5, floats(1, 1, 3, 3)),
    heads(),
    heads(4, whole(1, 1, 1, 0, 0, 1, 1, 1, 1, 1).reshape(2, 5)),
    group(),
    use("RotaryEmbedding", X, np.arange(1), floats(9, 2), floats(9, 2), num_heads=2),
    use("RelativePositionBias", floats(8, 4), *LENGTHS, max_distance=5),
    use("Pad", X, np.arange(6).reshape(1, 6)),
]

test_operands_that_do_not_fit_are_refused = refused(
    WRONG_SUMS + WRONG_BYTES + WRONG_BLOCKS + WRONG_ATTENTION
)


test_operands_that_fit_are_taken = taken(RIGHT)


# Operators, and for each operand its sizes as a model states them, in a run that fits, and in one
# that does not, though all the nodes that the operator stands for take it.
NEW_SIZES: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "a past of three parts": (
        {"op": "Attention", "num_heads": 2},
        [
            (("B", "S", 8), (2, 3, 8), (2, 3, 8)),
            floats(8, 24),
            floats(24),
            None,
            (("C", "B", 2, "P", 4), (2, 2, 2, 5, 4), (3, 2, 2, 5, 4)),
        ],
    ),
    "one length for two batches": (
        {"op": "GroupQueryAttention", "num_heads": 2, "kv_num_heads": 2},
        [
            *[(("B", "S", 8), (2, 3, 8), (2, 3, 8))] * 3,
            *[(("B", 2, "P", 4), (2, 2, 4, 4), (2, 2, 4, 4))] * 2,
            (("L",), (2,), (1,)),
            whole(4),
        ],
    ),
    "weights of another number of blocks": (
        {"op": "MatMulNBits", "K": 32, "N": 4, "block_size": 16, "bits": 8},
        [
            (("M", 32), (2, 32), (2, 32)),
            bytes_of(4, 2, 16),
            (("N", "b"), (4, 2), (4, 2)),
            None,
            (("G",), (32,), (40,)),
        ],
    ),
}


def _filled(shape: tuple[int, ...], dtype: str) -> Array:
    return floats(*shape) if dtype == "float32" else np.zeros(shape, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", NEW_SIZES)
def test_sizes_of_a_later_run_are_checked(case: str, device: str) -> None:
    attributes, operands = NEW_SIZES[case]
    values: list[sg.Value | None] = []
    runs: list[list[Array]] = [[], []]
    for k, operand in enumerate(operands):
        if isinstance(operand, tuple):
            dtype = "int32" if len(operand[0]) == 1 else "float32"
            values.append(sg.input(f"in{k}", operand[0], dtype))
            for given, shape in zip(runs, operand[1:], strict=True):
                given.append(_filled(shape, dtype))
        else:
            values.append(operand if operand is None else sg.parameter(f"w{k}", operand))
    node = sg.Node(
        attributes["op"],
        values,
        outputs=2 if "past" in case else 1,
        name="culprit",
        domain="com.microsoft",
        version=1,
        attrs={name: value for name, value in attributes.items() if name != "op"},
    )
    inputs = [value for value in values if value is not None and value.parameter is None]
    model = sg.compile_model(sg.Graph(inputs, node.outputs), device)
    before = model(runs[0])[0].copy()
    with pytest.raises(sg.ShapeError, match="culprit"):
        model(runs[1])
    np.testing.assert_array_equal(model(runs[0])[0], before)


test_rows_of_added_operators_are_not_broadcast = refused(
    [
        use("CDist", floats(4, 6), floats(5, 1)),
        *(
            use(op_type, floats(2, 5, 16), skip, floats(16))
            for op_type in ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
            for skip in (floats(16), floats(2, 5, 1), floats(2, 1, 16), floats(1)[0])
        ),
        use("SkipLayerNormalization", floats(1, 5, 16), floats(2, 5, 16), floats(16)),
        *(
            use(op_type, floats(2, 5, 16), floats(2, 5, 16), floats(1))
            for op_type in ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
        ),
        use("Unique", floats(2, 3)),
        use("ExpandDims", floats(2, 3), whole(0, -4)),
        use("ExpandDims", floats(2, 3), whole()),
        use(
            "FusedConv",
            *(floats(1, 1, 3), floats(1, 1, 1), floats(1), floats(2, 1, 1, 3)),
            activation="Relu",
        ),
    ]
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("op_type", "shapes", "attrs"),
    [
        ("FusedMatMul", [(1, 4, 2, 6), (6, 2, 5)], {"transBatchA": 1}),
        ("FusedGemm", [(2, 3), (3, 2)], {"activation": ""}),
        ("FusedConv", [(1, 1, 3), (1, 1, 1)], {"activation": "Clip", "activation_params": (1.0,)}),
    ],
)
def test_added_operators_have_no_body_for_other_attributes(
    op_type: str, shapes: list[tuple[int, ...]], attrs: dict[str, Any], device: str
) -> None:
    case = use(op_type, *(floats(*shape) for shape in shapes), **attrs)
    with pytest.raises(sg.UnsupportedOpError):
        run(case, device)

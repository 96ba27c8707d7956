"""Honest samples written by hand: operators that neither ONNX's suite nor the tests' tables hold.

These are the operators that ONNX Runtime adds (domain ``com.microsoft``), those of ``ai.onnx.ml``,
those without operands, and forms of old versions that no newer one has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import onnx
import onnx.parser
from onnx import helper

from subgraph.graph.types import Array

Operand = Array | list[Array] | dict[Any, Any] | None
MICROSOFT = "com.microsoft"
NCHWC = "com.microsoft.nchwc"
ML = "ai.onnx.ml"


@attrs.frozen(eq=False)
class Row:
    """One use of an operator.

    Attributes:
        op: Operator.
        inputs: Operands; a list is a sequence, a dictionary a map, None one that is left out.
        options: Attributes.
        outputs: Number of outputs.
        domain: Domain of the operator.
        version: Version of its domain.
    """

    op: str
    inputs: Sequence[Operand]
    options: dict[str, Any] = attrs.field(factory=dict[str, Any])
    outputs: int = 1
    domain: str = MICROSOFT
    version: int = 1


def _f(*shape: int, seed: int = 0) -> Array:
    """Return normal float32."""
    made = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return np.asarray(made, np.float32)


def _i(high: int, *shape: int, dtype: str = "int64") -> Array:
    """Return integers from 0 up to ``high``."""
    return np.asarray(np.random.default_rng([high, *shape]).integers(0, high, shape), dtype)


def _bytes(*shape: int, dtype: str = "uint8") -> Array:
    return _i(100, *shape, dtype=dtype)


def _list(*numbers: float, dtype: str = "int64") -> Array:
    return np.array(numbers, dtype)


def _number(value: float, dtype: str = "float32") -> Array:
    return np.array(value, dtype)


_ZERO = _number(100, "uint8")
_SCALE = _number(0.02)
_X = [_bytes(2, 3, 5), _SCALE, _ZERO]  # a quantized operand
_Y = [_number(0.05), _number(90, "uint8")]  # scale and zero point of a quantized result


def _sums() -> Iterator[Row]:
    x, skip, row = _f(2, 5, 16), _f(2, 5, 16, seed=1), _f(16, seed=2)
    yield from (Row(op, [x]) for op in ("Gelu", "FastGelu"))
    yield Row("QuickGelu", [x], {"alpha": 1.5})
    yield from (Row(op, [x, row]) for op in ("BiasGelu", "FastGelu", "BiasSplitGelu"))
    yield Row("BiasAdd", [x, row, skip])
    yield Row("BiasDropout", [x, row, skip], outputs=2)
    yield Row("BiasSoftmax", [_f(2, 3, 4, 5), _f(2, 1, 4, 5)], {"axis": 3, "is_inner_broadcast": 1})
    yield Row("BiasSoftmax", [_f(4, 3, 5), _f(2, 3, 5)], {"axis": 2, "is_inner_broadcast": 0})
    yield Row("SkipLayerNormalization", [x, skip, row, row, row], {"epsilon": 1e-5}, outputs=4)
    yield Row("SkipLayerNormalization", [x, _f(5, 16), row], {"epsilon": 1e-5})
    yield Row("SkipSimplifiedLayerNormalization", [x, skip, row, row], {"epsilon": 1e-5})
    simple = {"axis": -1, "epsilon": 1e-5}
    yield Row("SimplifiedLayerNormalization", [x, row], simple, domain="", version=17)
    image, channels = _f(2, 5, 6, 8), _f(8)
    groups = {"groups": 4, "activation": 1, "channels_last": 1}
    yield Row("GroupNorm", [image, channels, channels], groups)
    yield Row("SkipGroupNorm", [image, channels, channels, _f(2, 8), channels], groups, outputs=2)


def _embeddings() -> Iterator[Row]:
    ids, parts = _i(20, 2, 6, dtype="int32"), _i(3, 2, 6, dtype="int32")
    mask, places = np.ones((2, 6), np.int32), _i(9, 2, 6, dtype="int32")
    tables = [_f(20, 16), _f(9, 16), _f(3, 16), _f(16), _f(16)]
    yield Row("EmbedLayerNormalization", [ids, parts, *tables, mask, places], outputs=3)
    yield Row("EmbedLayerNormalization", [ids, None, *tables[:2], None, *tables[3:]], outputs=2)
    held = [_bytes(*table.shape) for table in tables]
    quantized = [*(_number(0.01 * k) for k in range(1, 6)), *([_ZERO] * 5)]
    yield Row("QEmbedLayerNormalization", [ids, parts, *held, mask, *quantized], outputs=2)
    distances = {"max_distance": 20, "is_bidirectional": 1}
    yield Row("RelativePositionBias", [_f(16, 4), _list(9), _list(9)], distances)
    turned: list[Operand] = [_f(2, 3, 5, 8), _i(7, 2, 5), _f(9, 4), _f(9, 4, seed=1)]
    yield Row("RotaryEmbedding", turned)
    yield Row("RotaryEmbedding", [_f(2, 5, 24), _list(2), *turned[2:]], {"num_heads": 3})


def _products() -> Iterator[Row]:
    a, b, c = _f(2, 3, 4, 6), _f(2, 3, 6, 5), _f(5)
    for op in ("FusedMatMul", "TransposeMatMul"):
        yield Row(op, [a, b], {"alpha": 0.5})
        yield Row(op, [_f(6, 4), _f(5, 6)], {"transA": 1, "transB": 1})
    yield Row("FusedMatMul", [_f(4, 2, 6), _f(6, 2, 5)], {"transBatchA": 1, "transBatchB": 1})
    relu = {"activation": "LeakyRelu", "activation_alpha": 0.25}
    yield Row("FusedMatMulActivation", [a, b], relu)
    yield Row("FusedGemm", [_f(4, 6), _f(5, 6), c], {"transB": 1, **relu})
    yield Row("GemmFastGelu", [_f(3, 4, 6), _f(6, 5), c])
    pads = {"pads": [1, 1, 1, 1], "strides": [1, 2], "kernel_shape": [3, 3], "group": 2}
    conv: list[Operand] = [_f(2, 6, 9, 8), _f(8, 3, 3, 3), _f(8), _f(2, 8, 9, 4)]
    clip = {"activation": "Clip", "activation_params": [-0.5, 1.0]}
    yield Row("FusedConv", conv, {**pads, "activation": "Relu"})
    yield Row("FusedConv", conv[:3], {**pads, **clip})
    sizes = {"K": 40, "N": 6, "bits": 4, "block_size": 16}
    packed = [_f(2, 40), _bytes(6, 3, 8), _f(6, 3), _bytes(6, 2)]
    groups = np.array([k // 16 for k in range(40)], np.int32)
    yield Row("MatMulNBits", packed, sizes)
    yield Row("MatMulNBits", [*packed, groups, _f(6)], sizes)
    rows: list[Operand] = [_bytes(7, 32), _list(0, 3, 6), _f(7, 4), _bytes(7, 2)]
    yield Row("GatherBlockQuantized", rows, {"block_size": 16, "bits": 4})
    yield Row("CDist", [_f(4, 6), _f(5, 6)], {"metric": "sqeuclidean"})
    rows = [_f(6, 16), _f(6, 4)]
    experts: list[Operand] = [_f(4, 32, 16), _f(4, 32), _f(4, 16, 16), _f(4, 16)]
    gated = {"activation_type": "swiglu", "swiglu_fusion": 1, "k": 2}
    yield Row("MoE", [*rows, *experts], gated)
    yield Row("MoE", [_f(2, 3, 16), rows[1], experts[2], None, *experts[2:]], {"k": 3})
    few = [_bytes(4, 32, 8), _f(4, 32, 1), _f(4, 32), _bytes(4, 16, 8), _f(4, 16, 1), _f(4, 16)]
    zeros = [None, None, None, _bytes(4, 32, 1), _bytes(4, 16, 1)]
    yield Row("QMoE", [*rows, *few, *zeros], {**gated, "block_size": 16, "weights_prepacked": 0})


def _recurrent() -> Iterator[Row]:
    state, taps = [_f(6), _f(2, 6, 3, seed=1)], _f(6, 1, 4)
    yield Row("CausalConvWithState", [_f(2, 6, 5), taps, *state], outputs=2)
    last: list[Operand] = [_f(2, 5, 2, 3), taps, state[0], _f(2, 6, 2, 3)]
    channels_last = {"channels_last": 1, "dilation": 2, "activation": "silu"}
    yield Row("CausalConvWithState", last, channels_last, outputs=2)
    gates: list[Operand] = [_f(2, 5, 2), _f(2, 5, 2, seed=1)]
    heads = {"q_num_heads": 4, "kv_num_heads": 2}
    tokens: list[Operand] = [_f(2, 5, 32), _f(2, 5, 16, seed=1), _f(2, 5, 12)]
    yield Row("LinearAttention", [*tokens, _f(2, 2, 8, 6), *gates], heads, outputs=2)
    fewer = {"q_num_heads": 1, "kv_num_heads": 2, "update_rule": "gated"}
    yield Row("LinearAttention", [_f(2, 5, 8), *tokens[1:], None, _f(2, 5, 16)], fewer, outputs=2)
    yield Row("LinearAttentionGate", [_f(2, 5, 4), _f(4), _f(4), _f(2, 5, 4)], outputs=2)
    yield Row("GatedRMSNorm", [_f(2, 5, 12), _f(4), _f(2, 5, 12, seed=1)])
    flat: list[Operand] = [_f(10, 2, 8), _f(10, 2, 8, seed=1), _f(10, 4, 6)]
    rates: list[Operand] = [_f(10, 4), _f(10, 4, seed=1), _f(2, 4, 6, 8)]
    yield Row("GatedDeltaNet", [*flat, None, *rates], outputs=2)
    yield Row("GatedDeltaNet", [*flat, np.array([0, 3, 10], np.int32), *rates], outputs=2)
    soft = {"gate_activation": "softplus", "beta_activation": "sigmoid", "qk_l2_norm": 1}
    packed: list[Operand] = [_f(2, 5, 56), None, None, None, _f(2, 5, 4, 8), _f(2, 5, 4), rates[2]]
    yield Row("GatedDeltaNet", [*packed, _f(4), _f(4, 8)], soft, outputs=2)


def _newer() -> Iterator[Row]:
    thrice = _i(9, 3, 2, 5)
    sections = {"mrope_section": [2, 1, 1], "num_heads": 3}
    yield Row("MRotaryEmbedding", [_f(2, 5, 24), thrice, _f(9, 4), _f(9, 4, seed=1)], sections)
    groups = {"top_k": 2, "n_group": 4, "topk_group": 2, "group_topk": 1}
    yield Row("MoEGroupRouter", [_f(7, 8), _f(8)], groups)
    yield Row("GatedAdd", [_f(2, 5, 4), _f(2, 5, 4, seed=1), _f(2, 5, 1)])
    yield Row("ScaledSiLU", [_f(2, 5, 4), np.array(0.5, np.float32)])
    yield Row("BranchwiseRMSNorm", [_f(2, 5, 3, 4), _f(3, 4)])
    yield Row("BranchwiseRMSNorm", [_f(2, 5, 12), _f(12)], {"num_branches": 3})
    sizes = {"K": 21, "N": 5, "block_size": 16, "quant_type": 1}
    yield Row("MatMulBnb4", [_f(2, 21), _bytes(53), _f(7)], sizes)
    yield Row("UnfoldTensor", [_f(2, 9, 3)], {"dim": 1, "size": 4, "step": 2})


def _engram() -> Iterator[Row]:
    tokens: list[Operand] = [_f(10, 5), _f(5, 1, 3), _list(0, 3, 7, 10, dtype="int32"), _f(5)]
    tokens += [_f(3, 5, 4), _list(2, 0, 9, dtype="int32")]
    steps = {"dilation": 2, "state_update_capacity": 3, "activation": "silu"}
    yield Row("VarlenCausalConvWithState", tokens, steps, outputs=3)
    streams, flat, gates = _f(2, 3, 4, 8), _f(2, 3, 32), _f(2, 3, 4)
    four = {"num_branches": 4}
    yield Row("HyperConnectionPreMix", [streams, gates], {"reduction_scale": 0.5})
    yield Row("HyperConnectionPreMix", [flat, _f(2, 3, 32)], four)
    yield Row("HyperConnectionPostMix", [streams, _f(2, 3, 8), _f(2, 3, 4, 1), _f(2, 3, 4, 4)])
    yield Row("HyperConnectionPostMix", [flat, _f(2, 3, 8), gates], four)
    factors = [_f(4, 8, seed=k) for k in range(3)]
    yield Row("EngramGate", [streams, _f(2, 3, 4, 8), _f(2, 3, 8), *factors], outputs=2)
    tables = {"pad_id": 0, "n_head_per_ngram": 2, "max_ngram_size": 3, "reset_on_eos": 1}
    ids: list[Operand] = [_i(9, 2, 6), _list(3, 5, 7), _list(11, 13, 17, 19)]
    more = [_i(9, 2, 2), _list(0, 11, 24, 41), _number(7, "int64"), _i(2, 2, 6, dtype="int32")]
    yield Row("NGramHashMapping", [*ids, *more], tables, outputs=2)
    yield Row("NGramHashMapping", ids, tables)


def _images() -> Iterator[Row]:
    """Yield operators on images, of the standard's beginnings too, and other operators."""
    x = _f(2, 3, 6, 7)
    regions = np.random.default_rng(5).uniform(-0.2, 1.2, (4, 4)).astype(np.float32)
    crops: list[Operand] = [x, regions, _i(2, 4, dtype="int32"), _list(3, 5, dtype="int32")]
    yield Row("CropAndResize", crops, {"extrapolation_value": 0.5})
    yield Row("CropAndResize", crops, {"mode": "nearest"})
    pads: list[Operand] = [_f(2, 4, 5, 6), _f(4, 3, 3, 3), _list(1, 0, 2, 1), _f(6)]
    yield Row("ConvTransposeWithDynamicPads", pads, {"group": 2, "strides": [1, 2]})
    yield Row("Inverse", [_f(2, 4, 4) + 3 * np.eye(4, dtype=np.float32)])
    yield Row("DynamicTimeWarping", [_f(5, 7)])
    yield Row("MatMulInteger16", [_bytes(2, 3, 4, dtype="int16"), _bytes(4, 5, dtype="int16")])
    factors = {"alpha": 0.5, "beta": 2.0}
    old: list[tuple[str, Sequence[Operand], dict[str, Any]]] = [
        ("Affine", [x], factors),
        ("Scale", [x], {"scale": 0.5}),
        ("ScaledTanh", [x], factors),
        ("ParametricSoftplus", [x], factors),
        ("ImageScaler", [x], {"bias": [0.5, 1.0, -1.0], "scale": 2.0}),
        ("Crop", [x], {"border": [1, 0, 2, 1]}),
        ("Crop", [x], {"border": [1, 2, 0, 0], "scale": [3, 4]}),
        ("DynamicSlice", [x, _list(1, -3), _list(2, 9), _list(0, 3)], {}),
    ]
    yield from (Row(op, inputs, options, domain="") for op, inputs, options in old)


def _texts() -> Iterator[Row]:
    words = np.array([["a few words", "", "one"]], object)
    needed: dict[str, Any] = {"mark": 1, "mincharnum": 1, "pad_value": "#"}
    yield Row("Tokenizer", [words], {**needed, "tokenexp": "[a-z]+"})
    yield Row("Tokenizer", [words[0]], {**needed, "separators": [" ", "e"]})
    yield Row("MurmurHash3", [words], {"seed": 3})
    yield Row("MurmurHash3", [_i(90, 3, 2)], {"positive": 0})


def _quantized() -> Iterator[Row]:
    x, bias = _X[0], _i(900, 4, dtype="int32")
    y: list[Operand] = [*_Y]
    for op in ("QLinearAdd", "QLinearMul"):
        yield Row(op, [*_X, _bytes(3, 1), _SCALE, _ZERO, *y])
    yield Row("QLinearLeakyRelu", [*_X, *y], {"alpha": 0.25})
    yield Row("QLinearSigmoid", [*_X, *y])
    yield Row("QLinearSoftmax", [*_X, *y], {"axis": -1, "opset": 13})
    yield Row("QLinearReduceMean", [*_X, *y], {"axes": [0, -1], "keepdims": 1})
    image = [_bytes(2, 4, 9, 8), _SCALE, _ZERO]
    window = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 0, 1, 1]}
    yield Row("QLinearAveragePool", [*image, *y], window)
    yield Row("QLinearGlobalAveragePool", [*image, *y], {"channels_last": 0})
    yield Row("QLinearConcat", [*y, *_X, _bytes(2, 4, 5), _SCALE, _ZERO], {"axis": 1})
    others = [_bytes(1, 5), _SCALE, _ZERO]
    yield Row("QLinearWhere", [_i(2, 2, 3, 1).astype(bool), *_X, *others, *y])
    weights = [_bytes(6, 4, dtype="int8"), _f(4) ** 2 + 0.01, np.zeros(4, np.int8)]
    yield Row("QGemm", [_bytes(3, 6), _SCALE, _ZERO, *weights, bias, *y])
    filters = [_bytes(4, 2, 3, 3, dtype="int8"), _SCALE, _number(0, "int8")]
    conv = {"group": 2, "kernel_shape": [3, 3], "pads": [1, 0, 1, 0]}
    yield Row("QLinearConv", [*image, *filters, *y, bias], conv)
    yield Row("NhwcMaxPool", [_bytes(2, 9, 8, 4)], window)
    scales, zeros = _f(3) ** 2 + 0.01, _bytes(3)
    yield Row("QuantizeLinear", [_f(2, 3, 5), scales, zeros], {"axis": 1})
    yield Row("QuantizeLinear", [_f(2, 3, 5), _SCALE, _ZERO])
    yield Row("DequantizeLinear", [x, scales, zeros], {"axis": 1})
    yield Row("DynamicQuantizeMatMul", [_f(2, 6), _bytes(6, 4), _SCALE, _ZERO, _f(4)])
    integers = [_bytes(2, 6), _bytes(6, 4), _SCALE, _f(4) ** 2, _ZERO, _bytes(4), _f(4)]
    yield Row("MatMulIntegerToFloat", integers)
    ones = [_list(0.003, dtype="float32"), _list(131, dtype="uint8")]
    cells: list[Operand] = [_f(5, 2, 3), _bytes(1, 3, 16), _bytes(1, 4, 16), _f(1, 32)]
    cells += [_list(5, 2, dtype="int32"), _f(1, 2, 4), _f(1, 2, 4), _f(1, 12), *ones, *ones]
    yield Row("DynamicQuantizeLSTM", cells, {"hidden_size": 4}, outputs=3)


def _attention() -> Iterator[Row]:
    mask = _i(2, 2, 3, dtype="int32")
    query, key = _f(2, 3, 8), _f(2, 5, 8)
    past, bias = _f(2, 2, 2, 5, 4), _f(2, 2, 3, 3)
    heads = {"num_heads": 2}
    yield Row("Attention", [query, _f(8, 24), _f(24), mask], heads)
    yield Row("Attention", [query, _f(8, 24), _f(24), None, past], heads, outputs=2)
    yield Row("Attention", [query, _f(8, 24), _f(24), None, None, bias], heads)
    yield Row("MultiHeadAttention", [query, key, key, _f(24)], heads)
    kept = [_f(2, 2, 5, 4), _f(2, 2, 5, 4)]
    more: list[Operand] = [query, query, query, None, None, _f(2, 2, 3, 8), *kept]
    yield Row("MultiHeadAttention", more, heads, outputs=3)
    ends, total = _list(4, 3, dtype="int32"), _number(9, "int32")
    caches = [_f(2, 2, 9, 4), _f(2, 2, 9, 4)]
    group = {"num_heads": 4, "kv_num_heads": 2}
    kv = _f(2, 3, 8)
    yield Row("GroupQueryAttention", [_f(2, 3, 16), kv, kv, *caches, ends, total], group, outputs=3)
    turns = {**group, "do_rotary": 1, "local_window_size": 3}
    turned = [_f(2, 3, 16), kv, kv, *caches, ends, total, _f(12, 2), _f(12, 2)]
    yield Row("GroupQueryAttention", turned, turns, outputs=3)
    sinks = [_f(2, 3, 16), kv, kv, *caches, ends, total, *[None] * 4, _f(4)]
    yield Row("GroupQueryAttention", sinks, group, outputs=3)
    integers = [_bytes(2, 3, 8), _bytes(8, 24, dtype="int8"), _f(24), _SCALE, _SCALE]
    yield Row("QAttention", [*integers, mask, _ZERO, _number(0, "int8")], heads)


def _movement() -> Iterator[Row]:
    yield Row("Trilu", [_f(2, 5, 5), _number(-1, "int64")], {"upper": 0})
    yield Row("GatherND", [_f(4, 3, 5), np.array([[1, 2], [3, 0]])])
    yield Row("Range", [_number(k) for k in (1, 4, 0.5)])
    yield Row("Pad", [_f(2, 3), _list(1, 0, 2, 1), _list(7, dtype="float32")])
    yield Row("ExpandDims", [_f(2, 3), _number(1, "int32")])
    yield Row("Unique", [_list(3, 1, 3, 2, 1, dtype="float32")], outputs=3)
    grid = np.random.default_rng(3).uniform(-1.2, 1.2, (2, 4, 5, 2)).astype(np.float32)
    for mode in ("bilinear", "nearest", "bicubic"):
        yield Row("GridSample", [_f(2, 3, 6, 7), grid], {"mode": mode, "align_corners": 1})


def _blocked() -> Iterator[Row]:
    """Yield operators on channels in blocks of 16 or less."""
    x = _f(2, 16, 5, 4)
    conv: list[Operand] = [x, _f(32, 16, 3, 3), _f(32), _f(2, 32, 3, 4)]
    window: dict[str, Any] = {"pads": [0, 1, 0, 1], "kernel_shape": [3, 3]}
    forms: list[tuple[str, Sequence[Operand], dict[str, Any]]] = [
        ("ReorderInput", [_f(2, 12, 5, 4)], {}),
        ("ReorderInput", [_f(2, 5, 4, 12)], {"channels_last": 1}),
        ("ReorderOutput", [x], {"channels": 12, "channels_last": 1}),
        ("Conv", conv, {**window, "activation": "Relu"}),
        ("Conv", [x, _f(16, 1, 3, 3)], {"group": 16, "strides": [2, 1]}),
        ("Conv", [_f(2, 3, 5, 4), _f(16, 3, 3, 3), _f(16)], window),
        ("MaxPool", [x], {**window, "strides": [2, 2]}),
        ("AveragePool", [x], {**window, "count_include_pad": 1}),
        ("GlobalMaxPool", [x], {}),
        ("GlobalAveragePool", [x], {}),
        ("Upsample", [x], {"scales": [1, 1, 2, 3]}),
        ("Upsample", [x], {"scales": [1, 1, 2, 2], "mode": "linear"}),
    ]
    yield from (Row(op, inputs, options, domain=NCHWC) for op, inputs, options in forms)


def _labels() -> Iterator[Row]:
    words = np.array([["cat", "dog"], ["cow", "cat"]], object)
    pairs: dict[str, Any] = {"cats_strings": ["cat", "dog"], "cats_int64s": [3, 5]}
    mapped: list[tuple[str, int, Operand, dict[str, Any]]] = [
        ("CategoryMapper", 1, words, {"default_int64": -7, **pairs}),
        ("CategoryMapper", 1, np.array([[3, 4], [5, 3]]), {"default_string": "none", **pairs}),
        ("LabelEncoder", 1, words, {"classes_strings": ["cat", "dog"], "default_int64": -2}),
        ("LabelEncoder", 1, _list(1, 0, 4), {"classes_strings": ["a", "b"]}),
        ("LabelEncoder", 2, words, {"keys_strings": ["cat", "cow"], "values_floats": [0.5, 1.5]}),
        ("LabelEncoder", 2, _list(7, 8, 7), {"keys_int64s": [7], "values_int64s": [70]}),
        ("CastMap", 1, {1: 0.5, 3: 2.0}, {"map_form": "SPARSE", "max_map": 4}),
        ("DictVectorizer", 1, {"a": 1.5, "z": 2.0}, {"string_vocabulary": ["a", "b", "z"]}),
        ("ZipMap", 1, _f(3, 2), {"classlabels_int64s": [10, 20]}),
        ("OneHotEncoder", 1, _list(1, 3, 2), {"cats_int64s": [1, 2, 3], "zeros": 1}),
        ("Imputer", 1, _f(3, 2), {"imputed_value_floats": [1.0, 2.0], "replaced_value_float": 0.0}),
    ]
    for op, version, x, options in mapped:
        yield Row(op, [x], options, domain=ML, version=version)


def _scores() -> Iterator[Row]:
    x = _f(3, 4)
    numbers: list[tuple[str, dict[str, Any]]] = [
        ("Scaler", {"offset": [1.0, 2.0, 3.0, 4.0], "scale": [0.5] * 4}),
        ("Normalizer", {"norm": "L1"}),
        ("Normalizer", {"norm": "MAX"}),
    ]
    for op, options in numbers:
        yield Row(op, [x], options, domain=ML)
    features = {"inputdimensions": [4, 2]}
    yield Row("FeatureVectorizer", [x, _f(3, 2)], features, domain=ML)
    lines: dict[str, Any] = {"coefficients": _f(8).tolist(), "intercepts": [0.5, -1.0]}
    yield Row("LinearRegressor", [x], {**lines, "targets": 2}, domain=ML)
    classes = {"classlabels_ints": [3, 5], "post_transform": "SOFTMAX"}
    yield Row("LinearClassifier", [x], {**lines, **classes}, outputs=2, domain=ML)
    kernel: dict[str, Any] = {"kernel_type": "RBF", "kernel_params": [0.25, 0.0, 3.0]}
    vectors = {"support_vectors": _f(12).tolist(), "coefficients": _f(3).tolist(), "rho": [0.25]}
    yield Row("SVMRegressor", [x], {**kernel, **vectors, "n_supports": 3}, domain=ML)
    two = {"classlabels_ints": [3, 5], "vectors_per_class": [1, 2]}
    yield Row("SVMClassifier", [x], {**kernel, **vectors, **two}, outputs=2, domain=ML)
    yield from _trees(x)


def _trees(x: Array) -> Iterator[Row]:
    """Yield one tree with two levels and three leaves, as regressor and as classifier."""
    nodes: dict[str, Any] = {
        "nodes_treeids": [0] * 5,
        "nodes_nodeids": [0, 1, 2, 3, 4],
        "nodes_featureids": [1, 3, 0, 0, 0],
        "nodes_values": [0.0, 0.25, 0.0, 0.0, 0.0],
        "nodes_modes": ["BRANCH_LEQ", "BRANCH_LT", "LEAF", "LEAF", "LEAF"],
        "nodes_truenodeids": [1, 3, 0, 0, 0],
        "nodes_falsenodeids": [2, 4, 0, 0, 0],
    }
    leaves = ("treeids", [0, 0, 0]), ("nodeids", [2, 3, 4]), ("ids", [0, 1, 1])
    votes = {"weights": [0.5, -1.0, 2.0]}
    for kind, outputs, more in (
        ("target", 1, {"n_targets": 2}),
        ("class", 2, {"classlabels_int64s": [3, 5]}),
    ):
        op = "TreeEnsembleRegressor" if kind == "target" else "TreeEnsembleClassifier"
        named = {f"{kind}_{name}": value for name, value in (*leaves, *votes.items())}
        for version in (1, 3):
            yield Row(op, [x], {**nodes, **named, **more}, outputs, ML, version)


def _sources() -> Iterator[Row]:
    """Yield operators without operands, and forms that only one version has."""
    for version in (1, 22):
        for op in ("RandomNormal", "RandomUniform"):
            yield Row(op, [], {"shape": [2, 3], "dtype": 1, "seed": 1.0}, 1, "", version)
            options = {"dtype": 1, "seed": 1.0}
            yield Row(f"{op}Like", [_f(2, 3)], options, 1, "", version)
    for version in (7, 22):
        yield Row("Multinomial", [_f(2, 4)], {"sample_size": 5, "seed": 1.0}, 1, "", version)
        yield Row("MaxRoiPool", *_rois(), 1, "", 1 if version == 7 else 22)
    value = onnx.numpy_helper.from_array(_f(2, 3))
    for version in (1, 9, 11, 12, 13, 19, 21, 23, 24, 25):
        yield Row("Constant", [], {"value": value}, 1, "", version)
        if version >= 12:
            yield Row("Constant", [], {"value_ints": [1, 2]}, 1, "", version)
            yield Row("Constant", [], {"value_float": 1.5}, 1, "", version)
    lengths = _list(5, 2, dtype="int32")
    for op, gates in (("GRU", 3), ("RNN", 1)):
        weights = _f(1, 4 * gates, 3), _f(1, 4 * gates, 4)
        yield Row(op, [_f(5, 2, 3), *weights, None, lengths], {"hidden_size": 4}, 2, "", 22)
    yield Row("DFT", [_f(1, 10, 1), _number(8, "int64"), _number(1, "int64")], {}, 1, "", 20)
    yield Row("SequenceEmpty", [], {"dtype": 7}, 1, "", 11)
    yield Row("SequenceConstruct", [_f(2, 3), _f(4)], {}, 1, "", 11)
    parts = [_f(6, 2), _list(1, 2, 3)]
    yield Row("SplitToSequence", parts, {"axis": 0}, 1, "", 11)
    several: list[Operand] = [[_f(2, 3), _f(4, 3), _f(1, 3)]]
    yield Row("SequenceAt", [*several, _number(1, "int64")], {}, 1, "", 11)
    yield Row("SequenceErase", [*several, _number(-1, "int64")], {}, 1, "", 11)
    yield Row("SequenceLength", several, {}, 1, "", 11)
    yield Row("ConcatFromSequence", several, {"axis": 0}, 1, "", 11)
    yield Row("ConcatFromSequence", [[_f(2, 3), _f(2, 3)]], {"axis": 1, "new_axis": 1}, 1, "", 11)
    for version in (15, 28):
        yield Row("Optional", [_f(2, 3)], {}, 1, "", version)
    for version in (15, 18):
        yield Row("OptionalHasElement", [_f(2, 3)], {}, 1, "", max(version, 18))
    channels = [_f(3) for _ in range(3)]
    first = {"consumed_inputs": [0, 0, 0, 1, 1], "is_test": 1}
    yield Row("BatchNormalization", [_f(2, 3, 4), *channels, _f(3) ** 2], first, 1, "", 1)
    yield Row("Cast", [_f(2, 3)], {"to": "INT32"}, 1, "", 1)
    yield Row("Tile", [_f(2, 3), _number(2), _number(1)], {}, 1, "", 1)
    scales = {"width_scale": 2.0, "height_scale": 1.5, "mode": "nearest"}
    yield Row("Upsample", [_f(1, 2, 3, 4)], scales, 1, "", 1)
    yield Row("Squeeze", [_f(1, 3, 1, 2), _list(0, 2)], {}, 1, "", 24)
    yield Row("DeformConv", _deformed(), {"kernel_shape": [2, 2]}, 1, "", 19)
    yield Row("If", [_number(1, "bool")], _branches(1), 1, "", 1)
    yield Row("Loop", [_number(3, "int64"), None, _f(2)], {"body": _body()}, 2, "", 1)


def _rois() -> tuple[list[Operand], dict[str, Any]]:
    regions = np.array([[0, 0, 0, 4, 4], [1, 1, 1, 3, 5]], np.float32)
    return [_f(2, 3, 6, 6), regions], {"pooled_shape": [2, 2], "spatial_scale": 1.0}


def _deformed() -> list[Operand]:
    return [_f(1, 1, 3, 3), _f(1, 1, 2, 2), _f(1, 8, 2, 2), _f(1), np.ones((1, 4, 2, 2), "float32")]


def _branches(size: int) -> dict[str, Any]:
    """Return the branches of an If that give constants."""
    made: dict[str, Any] = {}
    for name, seed in (("then_branch", 0), ("else_branch", 1)):
        value = onnx.numpy_helper.from_array(_f(size, seed=seed))
        node = helper.make_node("Constant", [], [f"{name}_out"], value=value)
        out = helper.make_tensor_value_info(f"{name}_out", 1, [size])
        made[name] = helper.make_graph([node], name, [], [out])
    return made


def _body() -> onnx.GraphProto:
    """Return the body of a Loop that doubles its state and lists it."""
    inputs = [
        helper.make_tensor_value_info("k", 7, []),
        helper.make_tensor_value_info("go", 9, []),
        helper.make_tensor_value_info("state", 1, [2]),
    ]
    outputs = [
        helper.make_tensor_value_info("more", 9, []),
        helper.make_tensor_value_info("doubled", 1, [2]),
        helper.make_tensor_value_info("listed", 1, [2]),
    ]
    nodes = [
        helper.make_node("Identity", ["go"], ["more"]),
        helper.make_node("Sum", ["state", "state"], ["doubled"]),
        helper.make_node("Identity", ["doubled"], ["listed"]),
    ]
    return helper.make_graph(nodes, "body", inputs, outputs)


_TABLE = "float[4,4] table = {0, 3, 1, 2, 2, 0, 3, 1, 1, 2, 0, 3, 3, 1, 2, 0}"
_CAUSAL = f"""
decoder (int32[B,S] input_ids, int32[B,S] position_ids, int32[B,T] attention_mask,
         float[2,B,1,P,1] past_0) => (float[B,S,4] logits, float[2,B,1,T,1] present_0)
<{_TABLE}, int64[3] axes = {{0, 2, 4}}> {{
    logits = Gather(table, input_ids)
    numbers = Cast<to = 1>(input_ids)
    key = Unsqueeze(numbers, axes)
    both = Concat<axis = 0>(key, key)
    present_0 = Concat<axis = 3>(past_0, both)
}}"""
_ENCODER = f"""
encoder (float[B,2,E] encoder_input_ids, int32[B,D] decoder_input_ids)
    => (float[B,D,4] logits, float[B,E,2] encoder_hidden_states, float[B,1,D,1] present_key_self_0,
        float[B,1,D,1] present_value_self_0, float[B,1,E,2] present_key_cross_0,
        float[B,1,E,2] present_value_cross_0)
<{_TABLE}, int64[2] axes = {{1, 3}}, int64[1] one = {{1}}> {{
    logits = Gather(table, decoder_input_ids)
    encoder_hidden_states = Transpose<perm = [0, 2, 1]>(encoder_input_ids)
    numbers = Cast<to = 1>(decoder_input_ids)
    present_key_self_0 = Unsqueeze(numbers, axes)
    present_value_self_0 = Identity(present_key_self_0)
    present_key_cross_0 = Unsqueeze(encoder_hidden_states, one)
    present_value_cross_0 = Identity(present_key_cross_0)
}}"""
_DECODER = f"""
decoder (int32[B,1] input_ids, float[B,1,P,1] past_key_self_0, float[B,1,P,1] past_value_self_0,
         float[B,1,E,2] past_key_cross_0, float[B,1,E,2] past_value_cross_0)
    => (float[B,1,4] logits, float[B,1,T,1] present_key_self_0, float[B,1,T,1] present_value_self_0)
<{_TABLE}, int64[2] axes = {{1, 3}}> {{
    logits = Gather(table, input_ids)
    numbers = Cast<to = 1>(input_ids)
    new = Unsqueeze(numbers, axes)
    present_key_self_0 = Concat<axis = 2>(past_key_self_0, new)
    present_value_self_0 = Concat<axis = 2>(past_value_self_0, new)
}}"""


def _searches() -> Iterator[Row]:
    """Yield models with the generation loop inside, of 4 tokens."""
    tokens = _i(4, 2, 3, dtype="int32")
    body: dict[str, Any] = {"decoder": onnx.parser.parse_graph(_CAUSAL)}
    body |= {"eos_token_id": 3, "pad_token_id": 0}
    most, least = _number(7, "int32"), _number(2, "int32")
    penalty = np.array([1.5], np.float32)
    greedy = [
        tokens,
        most,
        least,
        penalty,
        _i(2, 4, dtype="int32"),
        None,
        _i(2, 2, 3, dtype="int32"),
    ]
    yield Row("GreedySearch", greedy, body)
    yield Row("Sampling", [*greedy, None, _number(5, "int32")], {**body, "top_p": 0.9})
    beams = [_number(2, "int32"), _number(1, "int32"), penalty, penalty]
    yield Row("BeamSearch", [tokens, most, least, *beams], body, 2)
    encoder, decoder = map(onnx.parser.parse_graph, (_ENCODER, _DECODER))
    body = {**body, "encoder": encoder, "decoder": decoder, "decoder_start_token_id": 1}
    yield Row("WhisperBeamSearch", [_f(2, 2, 5), most, least, *beams], body, 2)
    token, cache = _f(2, 1, 12), _f(2, 3, 6, 4)
    cached = [token, token, token, None, None, cache, cache, _number(3, "int32")]
    form = {"num_heads": 3, "past_present_share_buffer": 1}
    yield Row("DecoderMaskedMultiHeadAttention", cached, form, 3)
    tokens = _i(3, 2, 6)
    yield Row("NGramRepeatBlock", [tokens, _f(2, 4)], {"ngram_size": 2})


def rows() -> Iterator[Row]:
    """Yield all samples of this table."""
    yield from _sums()
    yield from _embeddings()
    yield from _products()
    yield from _recurrent()
    yield from _newer()
    yield from _engram()
    yield from _images()
    yield from _texts()
    yield from _quantized()
    yield from _attention()
    yield from _movement()
    yield from _blocked()
    yield from _searches()
    yield from _labels()
    yield from _scores()
    yield from _sources()

"""ONNX Runtime's mixtures of experts: MoE, and QMoE with weights of 2, 4 or 8 bits.

A router chooses k experts for each row, whose results are added with the router's weights. An
expert is a network of two layers. CPU multiplies the rows of an expert together (the pattern
`grouped_products`), OPENCL each row with a copy of the expert's matrices.
"""

from __future__ import annotations

from typing import Any

import attrs

from subgraph.graph.graph import Node
from subgraph.operators.functions import Call, Results, function
from subgraph.operators.requirements import (
    Tensor,
    require,
    require_choice,
    require_dtype,
    require_rank,
    require_shape,
    require_whole_number,
)
from subgraph.operators.schema import MICROSOFT, Attribute

from .weights import BITS, LEAST_BLOCK, require_blocks, unpacked

_ACTIVATIONS = ("relu", "gelu", "silu", "swiglu", "identity")


@attrs.frozen
class _Layer:
    """A layer of all experts.

    Attributes:
        weights: ``[experts, outputs, inputs]``, or packed numbers of ``bits`` bits along the last
            axis, uint8.
        bias: ``[experts, outputs]``, or None.
        bits: Bits of a packed number; 0: the weights are floats.
        block: Inputs that share a scale.
        scales: ``[experts, outputs, blocks]``.
        zeros: Zero points ``[experts, outputs, bytes of the blocks]``, or None.
    """

    weights: Any
    bias: Any
    bits: int = 0
    block: int = 0
    scales: Any = None
    zeros: Any = None

    def of(self, call: Call, experts: Any) -> Any:
        """Return the matrix of each of ``experts``."""
        if not self.bits:
            return call.Gather(self.weights, experts, axis=0)
        return call.GatherBlockQuantized(
            self.weights, experts, self.scales, self.zeros, domain=MICROSOFT, bits=self.bits,
            block_size=self.block, gather_axis=0, quantize_axis=2,
        )  # fmt: skip


def _routed(call: Call, router: Any, mixing: Any, *, of_chosen: bool) -> tuple[Any, Any]:
    """Return the chosen experts of each row, and the weights of their results: both ``[rows, k]``.

    Args:
        call: The node.
        router: Logits of the experts, ``[rows, experts]``.
        mixing: Weights for the results, of the same shape; None: the probabilities of the logits.
        of_chosen: Whether probabilities that sum up to 1 are a softmax of the chosen logits; else
            they are those of all experts, divided by their sum.
    """
    k = [call.attribute("k")]
    normalized = bool(call.attribute("normalize_routing_weights"))
    if mixing is None and normalized and of_chosen:
        values, chosen = call.TopK(router, k, axis=-1, outputs=2)
        return chosen, call.Softmax(values, axis=-1)
    if mixing is not None:
        _, chosen = call.TopK(router, k, axis=-1, outputs=2)
        shares = call.GatherElements(mixing, chosen, axis=-1)
    else:
        shares, chosen = call.TopK(call.Softmax(router, axis=-1), k, axis=-1, outputs=2)
    if normalized:
        shares = call.Div(shares, call.ReduceSum(shares, [-1], keepdims=1))
    return chosen, shares


def _layer(call: Call, layer: _Layer, experts: Any, columns: Any) -> Any:
    """Return the layer of each row's expert, of columns ``[rows, inputs, 1]``."""
    product = call.MatMul(layer.of(call, experts), columns)
    if layer.bias is None:
        return product
    bias = call.Unsqueeze(call.Gather(layer.bias, experts, axis=0), [-1])
    return call.Add(product, bias)


def _activated(call: Call, x: Any, gate: Any) -> Any:
    """Return the activation of columns ``[rows, outputs, 1]``.

    Args:
        call: The node.
        x: The first layer.
        gate: What multiplies the activation, or None.
    """
    kind = call.attribute("activation_type")
    if kind == "swiglu":
        fusion, size = call.attribute("swiglu_fusion"), call.size(x, 1)
        if fusion == 1:  # pairs of neighbours
            pairs = call.Reshape(x, [0, size // 2, 2])
            x, gate = call.Split(pairs, axis=2, num_outputs=2, outputs=2)
        elif fusion == 2:
            x, gate = call.Split(x, axis=1, num_outputs=2, outputs=2)
        limit = call.attribute("swiglu_limit")
        if limit is not None:
            x, gate = call.Clip(x, None, limit), call.Clip(gate, -limit, limit)
        alpha, beta = call.attribute("activation_alpha"), call.attribute("activation_beta")
        swish = call.Mul(x, call.Sigmoid(call.Mul(x, alpha)))
        return call.Mul(swish, call.Add(gate, beta))
    if kind == "silu":
        x = call.Mul(x, call.Sigmoid(x))
    elif kind in ("relu", "gelu"):
        x = call.Relu(x) if kind == "relu" else call.Gelu(x, approximate="tanh")
    return x if gate is None else call.Mul(x, gate)


def _mixture(
    call: Call, routed: tuple[Any, Any], first: _Layer, second: _Layer, third: _Layer | None
) -> Results:
    """Return the sum of the results of each row's experts.

    Args:
        call: The node; its first input is ``[rows, size]`` or ``[batch, rows, size]``.
        routed: The result of `_routed`.
        first: The first layer.
        second: The second layer.
        third: The layer whose results multiply those of the first, or None.
    """
    x, k = call.inputs[0], call.attribute("k")
    chosen, shares = routed
    size = call.size(x, -1)
    rows = call.Reshape(x, [-1, 1, size])
    repeated = call.Expand(rows, [1, k, 1])
    columns = call.Reshape(repeated, [-1, size, 1])
    experts = call.Reshape(chosen, [-1])
    gate = None if third is None else _layer(call, third, experts, columns)
    inner = _activated(call, _layer(call, first, experts, columns), gate)
    results = call.Reshape(_layer(call, second, experts, inner), [-1, k, size])
    weighted = call.Mul(results, call.Unsqueeze(shares, [-1]))
    total = call.ReduceSum(weighted, [1], keepdims=0)
    return [call.Reshape(total, call.Shape(x))]


def _router_operands(
    node: Node, x: Tensor, router: Tensor, second: Tensor, third: Tensor | None
) -> bool:
    """Require a router's row for each row, experts that exist, and a gate for swiglu.

    Args:
        node: The node.
        x: Rows.
        router: Logits of the experts for each row.
        second: Weights of the second layer, ``[experts, size of a row, ...]``.
        third: Weights of the third layer; None: there is none.

    Returns:
        Whether the weights of the first layer hold those of the gate besides their own.
    """
    require_rank("fc2_experts_weights", second, 3)
    experts, size = second.shape[:2]
    require_rank("input", x, 2, 3)
    width = x.shape[-1]
    require(width == size, "rows have {} elements, the experts' results {}", width, size)
    rows = x.size // x.shape[-1] if x.shape[-1] else 0
    require_shape("router_probs", router, (rows, experts), "a logit for each row and expert")
    k = require_whole_number(node, "k", 1, least=1)
    require(k <= experts, "k is {}, and there are {} experts", k, experts)
    fusion = int(node.attrs.get("swiglu_fusion", 0))
    require(fusion in (0, 1, 2), "swiglu_fusion is {}; it is 0, 1 or 2", fusion)
    swiglu = require_choice(node, "activation_type", "relu", *_ACTIVATIONS) == "swiglu"
    fits = not swiglu or (third is None) == bool(fusion)
    require(fits, "swiglu takes its gate from fc3 if swiglu_fusion is 0, and only then")
    return swiglu and fusion > 0


def _layer_operands(
    name: str, weights: Tensor, bias: Tensor | None, experts: int, outputs: int, inputs: int
) -> None:
    require_shape(f"{name}_experts_weights", weights, (experts, outputs, inputs), "of each expert")
    require_shape(f"{name}_experts_bias", bias, (experts, outputs), "of each expert")


def moe_operands(
    node: Node, x: Tensor, router: Tensor, first: Tensor, first_bias: Tensor | None,
    second: Tensor, second_bias: Tensor | None = None, third: Tensor | None = None,
    third_bias: Tensor | None = None,
) -> None:  # fmt: skip
    """Raise ShapeError unless all experts have layers of fitting sizes.

    Args:
        node: The MoE.
        x: Rows.
        router: Logits of the experts for each row.
        first: Weights of the first layer.
        first_bias: Its bias.
        second: Weights of the second layer.
        second_bias: Its bias.
        third: Weights of the layer that multiplies the first.
        third_bias: Its bias.
    """
    doubled = _router_operands(node, x, router, second, third)
    experts, size, inner = second.shape
    _layer_operands("fc1", first, first_bias, experts, inner * (2 if doubled else 1), size)
    _layer_operands("fc2", second, second_bias, experts, size, inner)
    if third is not None:
        _layer_operands("fc3", third, third_bias, experts, inner, size)


_OPTIONS: dict[str, Any] = {
    "activation_alpha": 1.0,
    "activation_beta": 0.0,
    "activation_type": "relu",
    "k": 1,
    "normalize_routing_weights": 0,
    "swiglu_fusion": 0,
    "swiglu_limit": "float",
    "swiglu_limit_after_activation": 0,
    "use_sparse_mixer": 0,
}


_SUPPORTED = {"use_sparse_mixer": 0, "swiglu_limit_after_activation": 0}


@function(
    "MoE",
    "input, router_probs, fc1_experts_weights, fc1_experts_bias?, fc2_experts_weights,"
    " fc2_experts_bias?, fc3_experts_weights?, fc3_experts_bias? -> output",
    requires=moe_operands,
    **_OPTIONS,
)
def moe(call: Call) -> Results:
    """Add the results of the experts that the router chooses."""
    call.refuse_all_but(**_SUPPORTED)
    _, router, first, first_bias, second, second_bias, third, third_bias = call.inputs
    routed = _routed(call, router, None, of_chosen=False)
    gate = None if third is None else _Layer(third, third_bias)
    return _mixture(call, routed, _Layer(first, first_bias), _Layer(second, second_bias), gate)


def qmoe_operands(
    node: Node, x: Tensor, router: Tensor, first: Tensor, first_scales: Tensor | None,
    first_bias: Tensor | None, second: Tensor, second_scales: Tensor | None = None,
    second_bias: Tensor | None = None, third: Tensor | None = None,
    third_scales: Tensor | None = None, third_bias: Tensor | None = None,
    first_zeros: Tensor | None = None, second_zeros: Tensor | None = None,
    third_zeros: Tensor | None = None, mixing: Tensor | None = None, *rest: Tensor | None,
) -> None:  # fmt: skip
    """Raise ShapeError unless all experts have packed layers of fitting sizes.

    Args:
        node: The QMoE.
        x: Rows.
        router: Logits of the experts for each row.
        first: Packed weights of the first layer.
        first_scales: Their scales: one for a row of weights, or for each block of it.
        first_bias: Bias of the layer.
        second: As ``first``, of the second layer.
        second_scales: As ``first_scales``.
        second_bias: As ``first_bias``.
        third: As ``first``, of the layer that multiplies the first.
        third_scales: As ``first_scales``.
        third_bias: As ``first_bias``.
        first_zeros: Zero points of the first layer, packed as its weights.
        second_zeros: Those of the second layer.
        third_zeros: Those of the third layer.
        mixing: Weights for the results of all experts.
        rest: Scales of other kinds of weights, which the body refuses.
    """
    doubled = _router_operands(node, x, router, second, third)
    experts, size = second.shape[:2]
    require_shape("router_weights", mixing, router.shape, "one for each row and expert")
    inner = -1
    layers = (
        ("fc2", second, second_scales, second_bias, second_zeros),
        ("fc1", first, first_scales, first_bias, first_zeros),
        ("fc3", third, third_scales, third_bias, third_zeros),
    )
    for name, weights, scales, bias, zeros in layers:
        bits = weight_bits(node, name)
        if bits not in BITS or weights is None:
            continue  # the body refuses the node
        require_dtype(f"{name}_experts_weights", weights, "uint8")
        require(scales is not None, "{}_scales is not given", name)
        if name == "fc2":
            inputs, outputs = weights.shape[2] * 8 // bits, size
            inner = inputs
        else:
            inputs, outputs = size, inner * (2 if doubled and name == "fc1" else 1)
        _layer_operands(name, weights, bias, experts, outputs, -(-inputs * bits // 8))
        width = int(node.attrs.get("block_size", 0))
        shape: tuple[int, ...] = (experts, outputs)
        packed: tuple[int, ...] = (experts, -(-outputs * bits // 8))
        if width > 0:
            require_blocks(width)
            require(inputs % width == 0, "{} inputs are no whole blocks of {}", inputs, width)
            shape = (*shape, inputs // width)
            packed = (experts, outputs, -(-(inputs // width) * bits // 8))
        require_shape(f"{name}_scales", scales, shape, "one for each row or block of weights")
        require_shape(f"{name}_zero_points", zeros, packed, "packed as the weights are")


def weight_bits(node: Node, layer: str) -> int:
    """Return the bits of a weight of a QMoE's layer ``"fc1"`` to ``"fc3"``."""
    bits = node.attrs.get(f"{layer}_expert_weight_bits")
    return int(node.attrs.get("expert_weight_bits", 4) if bits is None else bits)


def _quantized(call: Call, name: str) -> _Layer:
    """Return layer ``"fc1"`` to ``"fc3"`` with packed weights."""
    packed = call.input(f"{name}_experts_weights")
    scales = call.input(f"{name}_scales")
    zeros = call.input(f"{name}_zero_points")
    x = call.inputs[0]
    bits, dtype = weight_bits(call.node, name), call.dtype(x)
    if bits not in BITS:
        raise call.unsupported(f"weights of {bits} bits")
    experts, outputs, inputs = (call.size(packed, axis) for axis in range(3))
    inputs *= 8 // bits
    block = int(call.attribute("block_size") or 0)
    if block <= 0:
        # A scale for each row: a block as long as a row, or longer, of a size that is supported.
        block = max(LEAST_BLOCK, 1 << (inputs - 1).bit_length())
        scales = call.Unsqueeze(scales, [-1])
        if zeros is not None:
            # A byte for each row, whose low bits are the number.
            points = unpacked(call, zeros, bits)
            points = call.Slice(points, [0], [outputs], [-1])
            zeros = call.Reshape(points, [experts, outputs, 1])
    bias = call.input(f"{name}_experts_bias")
    return _Layer(packed, bias, bits, block, call.cast(scales, dtype), zeros)


@function(
    "QMoE",
    "input, router_probs, fc1_experts_weights, fc1_scales?, fc1_experts_bias?, fc2_experts_weights,"
    " fc2_scales?, fc2_experts_bias?, fc3_experts_weights?, fc3_scales?, fc3_experts_bias?,"
    " fc1_zero_points?, fc2_zero_points?, fc3_zero_points?, router_weights?, fc1_global_scale?,"
    " fc2_global_scale?, fc1_act_scale?, fc2_act_scale?, fc1_act_block_scale?,"
    " fc2_act_block_scale? -> output",
    requires=qmoe_operands,
    **_OPTIONS,
    accuracy_level=0,
    block_size="int",
    expert_weight_bits=4,
    fc1_expert_weight_bits="int",
    fc2_expert_weight_bits="int",
    fc3_expert_weight_bits="int",
    quant_type=Attribute("quant_type", "string", default="int"),
    weights_prepacked=-1,
)
def qmoe(call: Call) -> Results:
    """Add the results of the experts that the router chooses, whose weights are quantized."""
    call.refuse_all_but(**_SUPPORTED)
    kind = call.attribute("quant_type")
    if kind != "int" or any(value is not None for value in call.inputs[15:]):
        raise call.unsupported(f"quant_type={kind!r}, or scales of such weights")
    if call.attribute("weights_prepacked") == 1:
        raise call.unsupported("weights_prepacked=1")
    first, second = _quantized(call, "fc1"), _quantized(call, "fc2")
    third = None if call.input("fc3_experts_weights") is None else _quantized(call, "fc3")
    routed = _routed(call, call.inputs[1], call.input("router_weights"), of_chosen=True)
    return _mixture(call, routed, first, second, third)


def group_router_operands(
    node: Node, logits: Tensor, bias: Tensor, weights: Tensor | None = None
) -> None:
    """Raise ShapeError unless experts are whole groups, of which enough are selected.

    Args:
        node: The MoEGroupRouter.
        logits: [..., experts]; with ``weights`` activations [rows, width].
        bias: [experts], float32.
        weights: [experts, width].
    """
    require(logits.rank >= 2, "logits has rank {}, at least 2 is needed", logits.rank)
    require_rank("expert_bias", bias, 1)
    require_dtype("expert_bias", bias, "float32")
    experts = bias.shape[0]
    if weights is None:
        require(logits.shape[-1] == experts, "{} logits, {} experts", logits.shape[-1], experts)
    else:
        require_rank("logits", logits, 2)
        require_shape("projection_weight", weights, (experts, logits.shape[1]), "rows of logits")
    groups = require_whole_number(node, "n_group", 1, least=1)
    active = require_whole_number(node, "topk_group", 1, least=1)
    require_whole_number(node, "group_topk", 2, least=1)
    require(experts % groups == 0 and active <= groups, "{} experts, n_group {}", experts, groups)
    top = require_whole_number(node, "top_k", 0, least=1)
    require(top <= experts, "top_k is {}, and there are {} experts", top, experts)


@function(
    "MoEGroupRouter",
    "logits, expert_bias, projection_weight? -> router_probs?, selection_scores?, router_weights?",
    requires=group_router_operands,
    group_topk=2,
    n_group=1,
    router_sentinel=-10000.0,
    top_k="int!",
    topk_group=1,
)
def moe_group_router(call: Call) -> Results:
    """Choose the best experts of the best groups, by sigmoids (DeepSeek-V3, "noaux_tc")."""
    logits, bias, weights = call.inputs
    dtype, experts = call.dtype(logits), call.size(bias, 0)
    rows: Any = call.cast(logits, "float32")
    if weights is not None:
        rows = call.MatMul(rows, call.Transpose(call.cast(weights, "float32"), perm=(1, 0)))
    scores = call.Sigmoid(call.Reshape(rows, [-1, experts]))
    chosen_by = call.Add(scores, bias)
    if call.is_used("selection_scores") or call.is_used("router_weights"):
        return [None, chosen_by, scores]
    allowed = _of_best_groups(call, chosen_by, experts)
    selectable = call.Where(allowed, chosen_by, call.constant(float("-inf"), "float32"))
    selected = call.And(_largest(call, selectable, call.attribute("top_k")), allowed)
    logarithms = call.Log(call.Max(scores, 1e-20))
    result = call.Where(
        selected, logarithms, call.constant(call.attribute("router_sentinel"), "float32")
    )
    return [call.cast(result, dtype), None, None]


def _largest(call: Call, scores: Any, count: int) -> Any:
    """Return whether each score is one of the ``count`` largest of its row."""
    _, indices = call.TopK(scores, [count], axis=-1, outputs=2)
    none = call.Expand(call.constant(False), call.Shape(scores))
    yes = call.Expand(call.constant(True), call.Shape(indices))
    return call.ScatterElements(none, indices, yes, axis=-1)


def _of_best_groups(call: Call, scores: Any, experts: int) -> Any:
    """Return whether each expert of each row is in one of the best groups, ``[rows, experts]``."""
    groups = call.attribute("n_group")
    shape = [-1, groups, experts // groups]
    best = min(call.attribute("group_topk"), experts // groups)
    values, _ = call.TopK(call.Reshape(scores, shape), [best], axis=-1, outputs=2)
    totals = call.ReduceSum(values, [-1], keepdims=0)
    of_group = call.Unsqueeze(_largest(call, totals, call.attribute("topk_group")), [-1])
    spread = call.Expand(of_group, [1, 1, experts // groups])
    return call.Reshape(spread, [-1, experts])

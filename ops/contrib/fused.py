"""What ONNX Runtime's optimiser fuses: products and convolutions with what stands around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from subgraph.graph.graph import Value
from subgraph.operators.functions import Call, function

from .transformer import added

Results = Sequence[Value | None]
# Of each activation the attributes that its parameters stand for, in order.
_ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "Relu": (),
    "Sigmoid": (),
    "Tanh": (),
    "Softplus": (),
    "Softsign": (),
    "LeakyRelu": ("alpha",),
    "Elu": ("alpha",),
    "ThresholdedRelu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
    "Selu": ("alpha", "gamma"),
}


def activated(call: Call, x: Any, name: str | None, parameters: Sequence[float]) -> Any:
    """Return an activation of ``x``; without a name ``x`` itself."""
    if name is None:
        return x
    if name == "Clip" and len(parameters) == 2:
        return call.Clip(x, *parameters)
    if name not in _ACTIVATIONS:
        raise call.unsupported(f"activation={name!r}")
    given = dict(zip(_ACTIVATIONS[name], parameters, strict=False))
    return getattr(call, name)(x, **given)


def _turn(call: Call, x: Any, batch: bool, last: bool) -> Any:
    """Return a matrix with its rows last, and perhaps its batches behind its first dimension."""
    if not (batch or last):
        return x
    order = list(range(call.rank(x)))
    if batch:
        order = [*order[1:-1], order[0], order[-1]]
    if last:
        order[-2:] = order[:-3:-1]
    return call.Transpose(x, perm=order)


def _product(call: Call, *, batches: bool) -> Any:
    """Return the product of the node's inputs, transposed and scaled as its attributes say."""
    ranks = [call.rank(x) for x in call.inputs if x is not None]
    moved = batches and (call.attribute("transBatchA") or call.attribute("transBatchB"))
    if moved and (ranks[0] != ranks[1] or ranks[0] < 3):
        raise call.unsupported(f"transBatchA or transBatchB of ranks {ranks[0]} and {ranks[1]}")
    turned = [
        _turn(
            call,
            x,
            batches and bool(call.attribute(f"transBatch{side}")),
            bool(call.attribute(f"trans{side}")),
        )
        for x, side in zip(call.inputs, "AB", strict=True)
    ]
    product, alpha = call.MatMul(*turned), call.attribute("alpha")
    return product if alpha == 1.0 else call.Mul(product, alpha)


_TURNS: dict[str, Any] = {"alpha": 1.0, "transA": 0, "transB": 0}
_BATCHES: dict[str, Any] = {"transBatchA": 0, "transBatchB": 0}


@function("FusedMatMul", "A, B -> Y", **_TURNS, **_BATCHES)
def fused_matmul(call: Call) -> Results:
    """Multiply what may be turned, and scale."""
    return [_product(call, batches=True)]


@function("TransposeMatMul", "A, B -> Y", **_TURNS)
def transpose_matmul(call: Call) -> Results:
    """Multiply what may be turned, and scale."""
    return [_product(call, batches=False)]


@function(
    "FusedMatMulActivation",
    "A, B -> Y",
    activation="string!",
    activation_alpha="float",
    activation_axis="int",
    activation_beta="float",
    activation_gamma="float",
    **_TURNS,
    **_BATCHES,
)
def fused_matmul_activation(call: Call) -> Results:
    """Multiply, scale, and apply an activation."""
    name = call.attribute("activation")
    if name == "Softmax":
        product = _product(call, batches=True)
        return [call.Softmax(product, axis=call.attribute("activation_axis"))]
    return [activated(call, _product(call, batches=True), name, _parameters(call, name))]


def _parameters(call: Call, name: str | None) -> list[float]:
    """Return an activation's parameters from attributes of their own."""
    found: list[float] = []
    for parameter in _ACTIVATIONS.get(name or "", ()):
        value = call.attribute(f"activation_{parameter}")
        if value is None:
            break
        found.append(value)
    return found


@function(
    "FusedGemm",
    "A, B, C? -> Y",
    activation="string",
    activation_alpha="float",
    activation_beta="float",
    activation_gamma="float",
    beta=1.0,
    **_TURNS,
)
def fused_gemm(call: Call) -> Results:
    """Gemm with an activation."""
    given = call.attributes("alpha", "beta", "transA", "transB")
    name = call.attribute("activation")
    return [activated(call, call.Gemm(*call.inputs, **given), name, _parameters(call, name))]


@function(
    "FusedConv",
    "X, W, B?, Z? -> Y",
    activation="string",
    activation_params="floats",
    auto_pad="NOTSET",
    dilations="ints",
    group=1,
    kernel_shape="ints",
    pads="ints",
    strides="ints",
)
def fused_conv(call: Call) -> Results:
    """Convolution, a sum, and an activation."""
    names = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    given = call.attributes(*names)
    total = added(call, call.Conv(*call.inputs[:3], **given), call.inputs[3], requires="same_shape")
    parameters = call.attribute("activation_params") or ()
    return [activated(call, total, call.attribute("activation"), parameters)]


@function(
    "NhwcMaxPool",
    "x -> y",
    auto_pad="NOTSET",
    ceil_mode=0,
    dilations="ints",
    kernel_shape="ints!",
    pads="ints",
    strides="ints",
)
def nhwc_max_pool(call: Call) -> Results:
    """MaxPool of bytes, the channels last."""
    (x,) = call.inputs
    assert x is not None, "the form says so"
    names = ("auto_pad", "ceil_mode", "dilations", "kernel_shape", "pads", "strides")
    rank = call.rank(x)
    turned = call.Transpose(x, perm=(0, rank - 1, *range(1, rank - 1)))
    pooled = call.MaxPool(turned, **call.attributes(*names))
    return [call.Transpose(pooled, perm=(0, *range(2, rank), 1))]

"""Fused products and convolutions of ONNX Runtime's optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from subgraph.operators.functions import Call, Results, function

from .transformer import added, channels_first

# Activations, and the attributes of their operators that are a fused node's parameters, in order.
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
    """Return an activation of a value.

    Args:
        call: The node.
        x: The value.
        name: Operator of the activation; None: ``x`` is returned.
        parameters: Its parameters, in the order of `_ACTIVATIONS`, or the bounds of Clip.

    Raises:
        UnsupportedOpError: The activation is not supported.
    """
    if name is None:
        return x
    if name == "Clip" and len(parameters) == 2:
        return call.Clip(x, *parameters)
    if name not in _ACTIVATIONS:
        raise call.unsupported(f"activation={name!r}")
    # Parameters that are left out at the end have the defaults of the operator.
    numbers = dict(zip(_ACTIVATIONS[name], parameters, strict=False))
    return getattr(call, name)(x, **numbers)


def _transposed(call: Call, x: Any, batch: bool, last: bool) -> Any:
    """Return a stack of matrices, transposed.

    ``last`` swaps the last two dimensions; before that, ``batch`` moves the first dimension to the
    second last.
    """
    if not (batch or last):
        return x
    order = list(range(call.rank(x)))
    if batch:
        order = [*order[1:-1], order[0], order[-1]]
    if last:
        # The last two axes in reverse order.
        order[-2:] = order[:-3:-1]
    return call.Transpose(x, perm=order)


def _product(call: Call, *, batches: bool) -> Any:
    """Return the product of the node's inputs, transposed and scaled by its attributes.

    ``batches``: the operator has ``transBatchA`` and ``transBatchB``.
    """
    ranks = [call.rank(x) for x in call.inputs if x is not None]
    moved = batches and (call.attribute("transBatchA") or call.attribute("transBatchB"))
    if moved and (ranks[0] != ranks[1] or ranks[0] < 3):
        raise call.unsupported(f"transBatchA or transBatchB of ranks {ranks[0]} and {ranks[1]}")
    transposed = [
        _transposed(
            call,
            x,
            batches and bool(call.attribute(f"transBatch{side}")),
            bool(call.attribute(f"trans{side}")),
        )
        for x, side in zip(call.inputs, "AB", strict=True)
    ]
    product, alpha = call.MatMul(*transposed), call.attribute("alpha")
    # Without the Mul by 1 the product stands next to its user, where fusions expect it.
    return product if alpha == 1.0 else call.Mul(product, alpha)


_PRODUCT_ATTRIBUTES: dict[str, Any] = {"alpha": 1.0, "transA": 0, "transB": 0}
_BATCH_ATTRIBUTES: dict[str, Any] = {"transBatchA": 0, "transBatchB": 0}


@function("FusedMatMul", "A, B -> Y", **_PRODUCT_ATTRIBUTES, **_BATCH_ATTRIBUTES)
def fused_matmul(call: Call) -> Results:
    """Scaled product of matrices that may be transposed."""
    return [_product(call, batches=True)]


@function("TransposeMatMul", "A, B -> Y", **_PRODUCT_ATTRIBUTES)
def transpose_matmul(call: Call) -> Results:
    """Scaled product of matrices that may be transposed."""
    return [_product(call, batches=False)]


@function(
    "FusedMatMulActivation",
    "A, B -> Y",
    activation="string!",
    activation_alpha="float",
    activation_axis="int",
    activation_beta="float",
    activation_gamma="float",
    **_PRODUCT_ATTRIBUTES,
    **_BATCH_ATTRIBUTES,
)
def fused_matmul_activation(call: Call) -> Results:
    """Scaled product with an activation."""
    name = call.attribute("activation")
    if name == "Softmax":
        product = _product(call, batches=True)
        return [call.Softmax(product, axis=call.attribute("activation_axis"))]
    return [activated(call, _product(call, batches=True), name, _parameters(call, name))]


def _parameters(call: Call, name: str | None) -> list[float]:
    """Return an activation's parameters, which are attributes named after them."""
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
    **_PRODUCT_ATTRIBUTES,
)
def fused_gemm(call: Call) -> Results:
    """Gemm with an activation."""
    options = call.attributes("alpha", "beta", "transA", "transB")
    name = call.attribute("activation")
    return [activated(call, call.Gemm(*call.inputs, **options), name, _parameters(call, name))]


CONVOLUTION_ATTRIBUTES: dict[str, Any] = {
    **{"auto_pad": "NOTSET", "dilations": "ints", "group": 1, "kernel_shape": "ints"},
    **{"pads": "ints", "strides": "ints"},
}


@function(
    "FusedConv",
    "X, W, B?, Z? -> Y",
    activation="string",
    activation_params="floats",
    **CONVOLUTION_ATTRIBUTES,
)
def fused_conv(call: Call) -> Results:
    """Convolution, a sum, and an activation."""
    return [fused_convolution(call, *call.inputs)]


def fused_convolution(call: Call, x: Any, w: Any, b: Any, z: Any) -> Any:
    """Return the convolution of ``x`` plus ``z``, activated, by the node's attributes."""
    product = call.Conv(x, w, b, **call.attributes(*CONVOLUTION_ATTRIBUTES))
    total = added(call, product, z, requires="same_shape")
    parameters = call.attribute("activation_params") or ()
    return activated(call, total, call.attribute("activation"), parameters)


POOL_ATTRIBUTES: dict[str, Any] = {
    **{"auto_pad": "NOTSET", "ceil_mode": 0, "dilations": "ints", "kernel_shape": "ints!"},
    **{"pads": "ints", "strides": "ints"},
}


@function("NhwcMaxPool", "x -> y", **POOL_ATTRIBUTES)
def nhwc_max_pool(call: Call) -> Results:
    """MaxPool with channels last."""
    options = call.attributes(*POOL_ATTRIBUTES)
    return [channels_first(call, call.inputs[0], lambda x: call.MaxPool(x, **options))]

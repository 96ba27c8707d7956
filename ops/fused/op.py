"""Operators of the domain "subgraph.cpu", which the CPU device's fusions create.

A fused node has the original nodes as its inner graph, which is its definition: the reference runs
it, and types are inferred through it. Trailing inputs may be missing; a missing one in the middle
is None. Lowerings are registered with ``@lowering`` in the families.

``FusedConv(X, W, B, R)``
    ``act(Conv(X, W, B) + R)``. Attributes of Conv, and those of an activation.
``FusedMatMul(A, B, C, R)``
    ``act(alpha * A' @ B' + beta * C + R)``: MatMul or Gemm (``transA``, ``transB``, ``alpha``,
    ``beta``); C broadcasts to the result, R has its shape.
``FusedAttention(Q, K, V, M)``
    ``softmax(scale * Q K' + M) V`` over four-dimensional operands. The attributes ``q_order``,
    ``k_order``, ``v_order`` and ``o_order`` (default ``"bhtd"``) name the dimensions of operands
    and result, a permutation of batch, heads, positions and size of a head: ``"bthd"`` and,
    for K, ``"bhdt"`` save a transposition. Q and the result must end in d. K and V may have fewer
    heads than Q; consecutive heads of Q share one. M is added and broadcasts to
    ``[batch, heads, queries, keys]``. ``scale`` (float, default 1), ``causal`` (default 0).
``FusedElementwise(...)``
    The elementwise operators of its inner graph, in one loop.

Attributes of an activation: ``activation`` is "" or one of `ACTIVATIONS`; ``activation_alpha`` and
``activation_beta`` are its parameters (floats): Clip's lower and upper bound, HardSigmoid's alpha
and beta, LeakyRelu's, Elu's and Swish's alpha.

Operators on weights alone (a folded BatchNormalization, a transposition) remain nodes of the graph;
the plan makes each of their results a constant operand, which the weight cache recomputes when a
parameter changes. Two operators exist only for that:

``BatchNormScale(scale, var)``
    ``scale / sqrt(var + epsilon)``, attribute ``epsilon``.
``ScaledShift(factor, bias, mean, B)``
    ``(B - mean) * factor + bias``; B may be missing (0).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph.graph import Node
from subgraph.graph.types import Array, TensorType
from subgraph.operators.operator import declare
from subgraph.operators.requirements import (
    Tensor,
    require,
    require_broadcast,
    require_dtype,
    require_rank,
    require_shape,
)
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.conv.op import convolution, require_filter_numbers
from subgraph.ops.elementwise.op import first_type
from subgraph.ops.pool.windows import require_filters

ACTIVATIONS = (
    "Relu",
    "Clip",
    "Sigmoid",
    "Tanh",
    "Gelu",
    "GeluTanh",
    "Silu",
    "Softplus",
    "Mish",
    "Erf",
    "HardSwish",
    "HardSigmoid",
    "LeakyRelu",
    "Elu",
    "Swish",
)


def fused_conv_operands(
    node: Node, x: Tensor, w: Tensor, b: Tensor | None = None, r: Tensor | None = None
) -> None:
    """Require a bias of one number per output channel, and a residual of the result's shape.

    The Add that was fused would broadcast them; the kernel does not.

    Args:
        node: The FusedConv.
        x: Input, ``[N, C, *spatial]``.
        w: Filters, ``[M, C / group, *kernel]``.
        b: Bias, ``[M]``, or None.
        r: Residual, of the result's shape and x's dtype, or None.

    Raises:
        ShapeError: They do not fit.
    """
    require_shape("B", b, w.shape[:1], "one for each output channel")
    if r is None:
        return
    require_dtype("R", r, x.dtype)
    own = convolution(node, [TensorType(x.dtype, x.shape), TensorType(w.dtype, w.shape)], ())[0]
    assert isinstance(own, TensorType), "a convolution gives a tensor"
    sizes = [dim for dim in own.shape or () if isinstance(dim, int)]
    require_shape("R", r, sizes, "the result's")


def fused_qlinear_conv_operands(node: Node, x: Tensor, *others: Tensor | None) -> None:
    """Require that filters, scales, zero points and bias fit, as QLinearConv does.

    ``others`` are x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias and its scale.
    """
    padded: list[Tensor | None] = list(others)
    padded += [None] * 9
    x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias, bias_scale = padded[:9]
    if w is None:
        raise ShapeError("the filters are missing")
    require_filters(node, x, w, bias)
    singles = (x_scale, x_zero, y_scale, y_zero)
    for name, operand in zip(("x_scale", "x_zero", "y_scale", "y_zero"), singles, strict=True):
        require_filter_numbers(name, operand, 1)
    for name, operand in (("w_scale", w_scale), ("w_zero", w_zero), ("b_scale", bias_scale)):
        require_filter_numbers(name, operand, w.shape[0])


def factors(node: Node, first: Tensor, *others: Tensor | None) -> None:
    """Require that all operands have the first one's shape, one number for each channel."""
    for operand in others:
        require_shape("an operand", operand, first.shape, "as many as the first has")


def fused_attention_operands(
    node: Node, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
) -> None:
    """Require that batch, heads, positions and sizes fit, and that the mask broadcasts.

    The products that were fused would broadcast; the kernel does not.

    Args:
        node: The FusedAttention, with the orders of dimensions.
        q: Queries, 4-D in the order ``q_order``.
        k: Keys, 4-D in the order ``k_order``.
        v: Values, 4-D in the order ``v_order``.
        mask: Added to the scores ``[batch, heads, queries, keys]``, to which it broadcasts; None.

    Raises:
        ShapeError: They do not fit.
    """
    sizes: list[dict[str, int]] = []
    for name, operand in (("q", q), ("k", k), ("v", v)):
        require_rank(name.upper(), operand, 4)
        require_dtype(name.upper(), operand, q.dtype)
        order = str(node.attrs.get(f"{name}_order", "bhtd"))
        require(sorted(order) == sorted("bhtd"), "{}_order is {!r}", name, order)
        sizes.append(dict(zip(order, operand.shape, strict=True)))
    of_q, of_k, of_v = sizes
    pairs = [(of_k["b"], of_q["b"]), (of_v["b"], of_q["b"]), (of_v["h"], of_k["h"])]
    pairs += [(of_v["t"], of_k["t"]), (of_k["d"], of_q["d"])]
    require(
        all(a == b for a, b in pairs) and of_k["h"] >= 1 and of_q["h"] % of_k["h"] == 0,
        "attention of {}, {} and {} by batch, heads, positions and size",
        *sizes,
    )
    require_dtype("the mask", mask, q.dtype)
    scores = (of_q["b"], of_q["h"], of_q["t"], of_k["t"])
    require_broadcast("the mask", mask, scores, "the scores")


def fused_qlinear_matmul_operands(
    node: Node, a: Tensor, a_scale: Tensor, a_zero: Tensor | None, b: Tensor, b_scale: Tensor,
    b_zero: Tensor | None, y_scale: Tensor | None = None, y_zero: Tensor | None = None,
    c: Tensor | None = None, c_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Require that scales and zero points fit: one for A and Y, one or one per column for B and C.

    Args:
        node: The FusedQLinearMatMul; with ``transB`` B is ``[N, K]``.
        a: Left side, ``[..., K]``, uint8 or int8.
        a_scale: Scale of a, one number.
        a_zero: Zero point of a, one number; None: 0.
        b: Right side, ``[K, N]``, uint8 or int8.
        b_scale: Scale of b, one number or one for each column.
        b_zero: Zero point of b, as many; None: 0.
        y_scale: Scale of the result, one number; None if the result is a float.
        y_zero: Zero point of the result, one number; None: 0.
        c: Added to each row, ``[N]``; None: nothing.
        c_scale: Scale of c, one number or one for each column.

    Raises:
        ShapeError: They do not fit.
    """
    require_rank("B", b, 2)
    require(a.rank >= 1, "a matrix product of a scalar")
    rows, columns = b.shape[::-1] if node.attrs.get("transB", 0) else b.shape
    require(a.shape[-1] == rows, "{} columns meet {} rows", a.shape[-1], rows)
    require_dtype("a_zero", a_zero, a.dtype)
    require_dtype("b_zero", b_zero, b.dtype)
    require_shape("C", c, (columns,), "one for each column")
    singles = (("a_scale", a_scale), ("a_zero", a_zero), ("y_scale", y_scale), ("y_zero", y_zero))
    for name, operand in singles:
        require_filter_numbers(name, operand, 1)
    for name, operand in (("b_scale", b_scale), ("b_zero", b_zero), ("c_scale", c_scale)):
        require_filter_numbers(name, operand, columns)


def batch_norm_scale(node: Node, inputs: Sequence[Any]) -> list[Array]:
    """Compute the factor of a BatchNormalization, in float64 inside."""
    scale, var = (np.asarray(a, np.float64) for a in inputs)
    return [(scale / np.sqrt(var + node.attrs["epsilon"])).astype(inputs[0].dtype)]


def scaled_shift(node: Node, inputs: Sequence[Any]) -> list[Array]:
    """Compute the bias of a convolution with a folded BatchNormalization, in float64 inside."""
    factor, bias, mean = (np.asarray(a, np.float64) for a in inputs[:3])
    before = inputs[3] if len(inputs) > 3 and inputs[3] is not None else 0.0
    shifted = (np.asarray(before, np.float64) - mean) * factor + bias
    return [shifted.astype(inputs[0].dtype)]


# The operators of this family, each in all its versions.
declare(
    "BatchNormScale",
    domain=INTERNAL_DOMAIN,
    requires=factors,
    infer=first_type,
    compute=batch_norm_scale,
)
declare("FusedAttention", domain=INTERNAL_DOMAIN, requires=fused_attention_operands)
declare("FusedConv", domain=INTERNAL_DOMAIN, requires=fused_conv_operands)
declare("FusedQLinearConv", domain=INTERNAL_DOMAIN, requires=fused_qlinear_conv_operands)
declare("FusedQLinearMatMul", domain=INTERNAL_DOMAIN, requires=fused_qlinear_matmul_operands)
declare(
    "ScaledShift", domain=INTERNAL_DOMAIN, requires=factors, infer=first_type, compute=scaled_shift
)
declare("FusedElementwise", domain=INTERNAL_DOMAIN)

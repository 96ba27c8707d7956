"""The activations that convolutions and products apply to their results: one row for each.

A fused node states its activation by the attribute ``activation`` ("": none), and the parameters p
and q of that by ``activation_alpha`` and ``activation_beta`` (floats). On the CPU, Relu and Clip
are flags of the tiles (`tile_planning`); the kernels of the others are in `activation_kernels`,
under the same names. The pass ``CpuFusion`` fuses the operators that have a row here.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from subgraph.graph.graph import Node


class Form(NamedTuple):
    """An activation.

    Attributes:
        opencl: C expression of x, of type T, and the parameters p and q.
        keeps_zero: Whether the activation of 0 is 0 for all parameters. If not, lowerings clear the
            padding channels of the blocked layout. Clip depends on its bounds.
        parameters: The attributes of the operator that are p and q, with their defaults. Those of
            Clip stand for its bounds, which may be inputs.
    """

    opencl: str
    keeps_zero: bool
    parameters: tuple[tuple[str, float], ...] = ()


ACTIVATIONS = {
    "Relu": Form("(x < 0 ? 0 : x)", True),
    "Clip": Form("(x < p ? p : x > q ? q : x)", False, (("low", -math.inf), ("high", math.inf))),
    "Sigmoid": Form("(1 / (1 + exp(-x)))", False),
    "Tanh": Form("tanh(x)", True),
    "Gelu": Form("(x * (T)0.5 * (1 + erf(x * (T)0.70710678118654752440)))", True),
    "GeluTanh": Form(  # Gelu with the attribute approximate = "tanh"
        "(x / (1 + exp((T)-1.5957691216057308 * (x + (T)0.044715 * x * x * x))))", True
    ),
    "Silu": Form("(x / (1 + exp(-x)))", True),  # Swish with alpha = 1
    "Swish": Form("(x / (1 + exp(-p * x)))", True, (("alpha", 1.0),)),
    "Softplus": Form("(fmax(x, (T)0) + log1p(exp(-fabs(x))))", False),
    "Mish": Form("(x * tanh(fmax(x, (T)0) + log1p(exp(-fabs(x)))))", True),
    "HardSwish": Form("(x * clamp(x / 6 + (T)0.5, (T)0, (T)1))", True),
    "HardSigmoid": Form("clamp(x * p + q, (T)0, (T)1)", False, (("alpha", 0.2), ("beta", 0.5))),
    "LeakyRelu": Form("(x < 0 ? x * p : x)", True, (("alpha", 0.01),)),
    "Elu": Form("(x < 0 ? p * expm1(x) : x)", True, (("alpha", 1.0),)),
}


def stated_activation(node: Node) -> tuple[str, float, float]:
    """Return the name of a node's activation, "" for none, and its parameters p and q."""
    p, q = (float(node.attrs.get(f"activation_{key}", 0.0)) for key in ("alpha", "beta"))
    return str(node.attrs.get("activation", "")), p, q

"""Operators of ONNX as functions of PyTorch.

Each entry of `OPERATORS` takes a `Call`, checks its attributes and returns a function of tensors. A
form that PyTorch computes in another way raises NotImplementedError, whose text is the reason why
the node is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import attrs

from subgraph.devices.backends.libraries.translation import NodeForm

# Takes the node's inputs as tensors, None where one is left out; returns a tensor or a sequence.
Function: TypeAlias = Callable[..., Any]
Unary: TypeAlias = Callable[[Any], Any]
Binary: TypeAlias = Callable[[Any, Any], Any]


@attrs.frozen
class Call(NodeForm):
    """A node that is to become a function.

    Attributes:
        torch: The module.
        outputs: Number of outputs that the node has.
    """

    torch: Any
    outputs: int

    def one_output(self, others: str) -> None:
        """Require that the node has no other outputs, which the text names.

        Raises:
            NotImplementedError: It has.
        """
        if self.outputs > 1:
            raise NotImplementedError(f"{others} are not translated")


def _numbers(operand: Any) -> list[int]:
    """Return axes or sizes: an operand of `WITH_NUMBERS` as a tensor, or as a list if a weight."""
    if hasattr(operand, "reshape"):
        operand = operand.reshape(-1).tolist()
    numbers: list[int] = operand
    return numbers


def _plain(name: str) -> Callable[[Call], Function]:
    """Return an entry for an operator that is one function of ``torch``, without attributes."""

    def entry(call: Call) -> Function:
        function: Function = getattr(call.torch, name)
        return function

    return entry


def _split_pads(pads: Sequence[int] | None, rank: int) -> tuple[list[int], list[int]]:
    """Return symmetric pads, and those of `torch.nn.functional.pad` where they are asymmetric."""
    pads = list(pads or [0] * 2 * rank)
    before, after = pads[:rank], pads[rank:]
    if before == after:
        return before, []
    reverse = zip(reversed(before), reversed(after), strict=True)
    return [0] * rank, [n for pair in reverse for n in pair]


def _conv(call: Call, transposed: bool = False) -> Function:
    call.only("auto_pad", "NOTSET")
    if transposed:
        call.only("output_shape", None)
    torch, groups = call.torch, int(call.get("group", 1))

    def run(x: Any, w: Any, b: Any = None) -> Any:
        rank = x.dim() - 2
        pads, around = _split_pads(call.get("pads"), rank)
        strides, dilations = (list(call.get(n) or [1] * rank) for n in ("strides", "dilations"))
        extra = list(call.get("output_padding") or [0] * rank)
        if around and not transposed:
            x = torch.nn.functional.pad(x, around)
        y = torch.convolution(x, w, b, strides, pads, dilations, transposed, extra, groups)
        if around and transposed:  # a negative pad takes elements away
            y = torch.nn.functional.pad(y, [-n for n in around])
        return y

    return run


def _pool(call: Call, largest: bool) -> Unary:
    for name, default in (("auto_pad", "NOTSET"), ("ceil_mode", 0), ("storage_order", 0)):
        call.only(name, default)
    call.one_output("indices")
    functional, kernel = call.torch.nn.functional, list(call.get("kernel_shape"))
    rank, strides = len(kernel), list(call.get("strides") or [1] * len(kernel))
    pads, around = _split_pads(call.get("pads"), rank)
    dilations = list(call.get("dilations") or [1] * rank)
    if not largest and (around or dilations != [1] * rank):
        raise NotImplementedError("an average with asymmetric pads or dilations")
    if not 1 <= rank <= 3:
        raise NotImplementedError(f"windows of {rank} axes")
    if any(2 * pad > size for pad, size in zip(pads, kernel, strict=True)):
        if not largest:
            raise NotImplementedError("an average with pads of more than half a window")
        around, pads = [pad for pad in reversed(pads) for _ in range(2)], [0] * rank
    if not largest:
        counted = bool(call.get("count_include_pad", 0))
        average = getattr(functional, f"avg_pool{rank}d")
        return lambda x: average(x, kernel, strides, pads, False, counted)
    pool = getattr(functional, f"max_pool{rank}d")

    def run(x: Any) -> Any:
        if around:
            x = functional.pad(x, around, value=float("-inf"))
        return pool(x, kernel, strides, pads, dilations)

    return run


def _global(name: str) -> Callable[[Call], Function]:
    def entry(call: Call) -> Unary:
        reduce = getattr(call.torch, name)
        return lambda x: reduce(x, list(range(2, x.dim())), True)

    return entry


def _reduce(name: str, square: bool = False) -> Callable[[Call], Function]:
    def entry(call: Call) -> Function:
        torch, keep = call.torch, bool(call.get("keepdims", 1))
        stays = call.get("noop_with_empty_axes")

        def run(x: Any, axes: Any = None) -> Any:
            chosen = list(call.get("axes") or []) if axes is None else _numbers(axes)
            if not chosen and stays:
                return x * x if square else x
            chosen = chosen or list(range(x.dim()))
            # torch.sum returns int64 for every integer type.
            return getattr(torch, name)(x * x if square else x, chosen, keepdim=keep).to(x.dtype)

        return run

    return entry


def _softmax(name: str) -> Callable[[Call], Function]:
    def entry(call: Call) -> Unary:
        function, axis = (
            getattr(call.torch, name),
            int(call.get("axis", -1 if call.version > 12 else 1)),
        )
        if call.version > 12:
            return lambda x: function(x, axis)
        # Before opset 13 all axes from this one on count as one.
        return lambda x: function(x.flatten(axis % x.dim()), -1).reshape(x.shape)

    return entry


def _clip(call: Call) -> Function:
    low, high = call.get("min"), call.get("max")
    torch = call.torch

    def run(x: Any, least: Any = None, most: Any = None) -> Any:
        least, most = low if least is None else least, high if most is None else most
        if least is not None:
            x = torch.clamp(x, min=least)
        return x if most is None else torch.clamp(x, max=most)

    return run


def _divide(call: Call) -> Binary:
    divide = call.torch.div
    return lambda x, y: divide(x, y, rounding_mode=None if x.is_floating_point() else "trunc")


def _gemm(call: Call) -> Function:
    alpha, beta = float(call.get("alpha", 1.0)), float(call.get("beta", 1.0))
    left, right = bool(call.get("transA")), bool(call.get("transB"))
    torch = call.torch

    def run(a: Any, b: Any, c: Any = None) -> Any:
        a, b = a.T if left else a, b.T if right else b
        if alpha == beta == 1:
            return torch.mm(a, b) if c is None else torch.addmm(c, a, b)
        if not a.is_floating_point():  # torch.addmm rounds alpha and beta to integers
            product = alpha * torch.mm(a, b)
            return (product if c is None else product + beta * c).to(a.dtype)
        return alpha * torch.mm(a, b) if c is None else torch.addmm(c, a, b, alpha=alpha, beta=beta)

    return run


def _batch_norm(call: Call) -> Callable[[Any, Any, Any, Any, Any], Any]:
    call.only("training_mode", 0)
    normalize, epsilon = call.torch.nn.functional.batch_norm, float(call.get("epsilon", 1e-5))
    call.one_output("statistics of a batch")
    return lambda x, scale, b, mean, var: normalize(x, mean, var, scale, b, eps=epsilon)


def _layer_norm(call: Call) -> Function:
    call.one_output("mean and deviation")
    normalize, epsilon = call.torch.nn.functional.layer_norm, float(call.get("epsilon", 1e-5))
    axis = int(call.get("axis", -1))

    def run(x: Any, scale: Any, b: Any = None) -> Any:
        shape = x.shape[axis:]
        if max(scale.dim(), 0 if b is None else b.dim()) > len(shape):  # differs between rows
            normalized = normalize(x, shape, eps=epsilon) * scale
            return normalized if b is None else normalized + b
        return normalize(
            x, shape, scale.expand(shape), None if b is None else b.expand(shape), epsilon
        )

    return run


def _instance_norm(call: Call) -> Callable[[Any, Any, Any], Any]:
    normalize, epsilon = call.torch.nn.functional.instance_norm, float(call.get("epsilon", 1e-5))
    return lambda x, scale, b: normalize(x, weight=scale, bias=b, eps=epsilon)


def _lrn(call: Call) -> Unary:
    size = int(call.get("size"))
    if size % 2 == 0:
        raise NotImplementedError("a window of an even number of channels")
    normalize = call.torch.nn.functional.local_response_norm
    alpha, beta, bias = (
        call.get(n, d) for n, d in (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0))
    )
    return lambda x: normalize(x, size, alpha, beta, bias)


def _reshape(call: Call) -> Function:
    keep_zero = not call.get("allowzero")

    def run(x: Any, shape: Any) -> Any:
        dims = _numbers(shape)
        dims = [x.shape[k] if n == 0 and keep_zero else n for k, n in enumerate(dims)]
        return x.reshape(dims)

    return run


def _squeeze(call: Call) -> Function:
    def run(x: Any, axes: Any = None) -> Any:
        chosen = call.get("axes") if axes is None else _numbers(axes)
        return x.squeeze() if chosen is None else x.squeeze(tuple(chosen))

    return run


def _unsqueeze(call: Call) -> Function:
    def run(x: Any, axes: Any = None) -> Any:
        chosen = list(call.get("axes")) if axes is None else _numbers(axes)
        rank = x.dim() + len(chosen)
        for axis in sorted(axis % rank for axis in chosen):
            x = x.unsqueeze(axis)
        return x

    return run


def _flatten(call: Call) -> Function:
    axis = int(call.get("axis", 1))

    def run(x: Any) -> Any:
        first = axis % x.dim() if axis < 0 else axis
        rows = x.shape[:first].numel()
        return x.reshape(rows, x.numel() // max(rows, 1))

    return run


def _transpose(call: Call) -> Unary:
    order = call.get("perm")
    return lambda x: x.permute(list(order) if order else list(range(x.dim() - 1, -1, -1)))


def _concat(call: Call) -> Function:
    axis, concatenate = int(call.get("axis")), call.torch.cat

    def run(*parts: Any) -> Any:
        return concatenate(parts, axis)

    return run


def _gather(call: Call) -> Function:
    axis, torch = int(call.get("axis", 0)), call.torch

    def run(x: Any, indices: Any) -> Any:
        along = axis % x.dim()
        flat = indices.reshape(-1)
        rows = torch.index_select(x, along, torch.where(flat < 0, flat + x.shape[along], flat))
        return rows.reshape((*x.shape[:along], *indices.shape, *x.shape[along + 1 :]))

    return run


def _gelu(call: Call) -> Unary:
    function, how = call.torch.nn.functional.gelu, call.get("approximate", "none")
    return lambda x: function(x, approximate=how)


def _activation(name: str, **defaults: float) -> Callable[[Call], Function]:
    """Return an entry for a function of `torch.nn.functional` with float attributes."""

    def entry(call: Call) -> Unary:
        numbers = [float(call.get(key, value)) for key, value in defaults.items()]
        function = getattr(call.torch.nn.functional, name)
        return lambda x: function(x, *numbers)

    return entry


def _many(name: str) -> Callable[[Call], Function]:
    """Return an entry for a function of two tensors that the operator applies to any number."""

    def entry(call: Call) -> Function:
        function = getattr(call.torch, name)

        def run(first: Any, *others: Any) -> Any:
            for other in others:
                first = function(first, other)
            return first

        return run

    return entry


def _cast(call: Call) -> Unary:
    names = {1: "float32", 6: "int32", 7: "int64", 9: "bool", 11: "float64"}
    dtype = getattr(call.torch, names[int(call.get("to"))])
    return lambda x: x.to(dtype)


def _expand(call: Call) -> Binary:
    torch = call.torch
    return lambda x, shape: x.expand(torch.broadcast_shapes(x.shape, _numbers(shape)))


def _first(x: Any, *_: Any) -> Any:
    return x


def _dropout(call: Call) -> Function:
    call.one_output("masks")
    return _first


def _norm(order: int) -> Callable[[Call], Function]:
    def entry(call: Call) -> Function:
        reduce = _reduce("sum")(call)

        def run(x: Any, *axes: Any) -> Any:
            return reduce(x.abs(), *axes) if order == 1 else reduce(x * x, *axes).sqrt()

        return run

    return entry


def _selu(call: Call) -> Unary:
    alpha, gamma = call.get("alpha"), call.get("gamma")
    alpha = 1.67326319217681884765625 if alpha is None else float(alpha)
    gamma = 1.05070102214813232421875 if gamma is None else float(gamma)
    elu = call.torch.nn.functional.elu
    return lambda x: gamma * elu(x, alpha)


def _sign(call: Call) -> Unary:
    torch = call.torch
    return lambda x: torch.where(x == x, torch.sign(x), x)  # torch.sign of NaN is 0


def _power(call: Call) -> Binary:
    return lambda x, y: call.torch.pow(x, y).to(x.dtype)


_SAME_NAME = (
    *("Abs", "Ceil", "Cos", "Erf", "Exp", "Floor", "Log", "MatMul", "Neg", "Reciprocal", "Relu"),
    *("Round", "Sigmoid", "Sin", "Sqrt", "Tanh", "Where"),
)
OPERATORS: dict[str, Callable[[Call], Function]] = {
    **{name: _plain(name.lower()) for name in _SAME_NAME},
    **{name: _plain(name.lower()) for name in ("Add", "Mul", "Sub")},
    **{"And": _plain("logical_and"), "Or": _plain("logical_or"), "Not": _plain("logical_not")},
    **{"Equal": _plain("eq"), "Greater": _plain("gt"), "GreaterOrEqual": _plain("ge")},
    **{"Less": _plain("lt"), "LessOrEqual": _plain("le")},
    **{"Max": _many("maximum"), "Min": _many("minimum"), "Sum": _many("add")},
    **{"Div": _divide, "Pow": _power, "Clip": _clip, "Gelu": _gelu, "Sign": _sign},
    **{"Elu": _activation("elu", alpha=1.0), "LeakyRelu": _activation("leaky_relu", alpha=0.01)},
    **{"HardSwish": _activation("hardswish"), "Mish": _activation("mish")},
    **{"Softplus": _activation("softplus"), "Softsign": _activation("softsign")},
    **{"Selu": _selu, "Identity": lambda _: _first},
    **{"Conv": _conv, "ConvTranspose": lambda call: _conv(call, transposed=True)},
    **{"MaxPool": lambda call: _pool(call, True), "AveragePool": lambda call: _pool(call, False)},
    **{"GlobalAveragePool": _global("mean"), "GlobalMaxPool": _global("amax")},
    **{"ReduceMean": _reduce("mean"), "ReduceSum": _reduce("sum"), "ReduceMax": _reduce("amax")},
    **{"ReduceMin": _reduce("amin"), "ReduceSumSquare": _reduce("sum", square=True)},
    **{"Softmax": _softmax("softmax"), "LogSoftmax": _softmax("log_softmax"), "Gemm": _gemm},
    **{"BatchNormalization": _batch_norm, "LayerNormalization": _layer_norm, "LRN": _lrn},
    **{"InstanceNormalization": _instance_norm, "Reshape": _reshape, "Flatten": _flatten},
    **{"Squeeze": _squeeze, "Unsqueeze": _unsqueeze, "Transpose": _transpose},
    **{"Concat": _concat, "Gather": _gather, "Cast": _cast, "Expand": _expand},
    **{"Dropout": _dropout, "ReduceL1": _norm(1), "ReduceL2": _norm(2)},
}
# Operators whose second operand are axes or sizes, which a function takes as a list, too.
WITH_NUMBERS = frozenset(
    {
        *("Expand", "ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum"),
        *("ReduceSumSquare", "Reshape", "Squeeze", "Unsqueeze"),
    }
)

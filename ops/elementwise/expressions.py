"""What elementwise operators compute, as programs for the elementwise kernels of any device.

An `Expression` collects inputs, numbers and instructions; `expand` adds one operator to it, and
`expand_graph` a chain of operators (the inner graph of a fused node). ``kernels.py`` describes the
text of a program. Nothing in this module depends on a device.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from subgraph.dtypes import FLOATS, HALF_FLOATS, INTEGERS, compute_dtype
from subgraph.engine.planner.lowering import Unsupported
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.types import DTYPE_OF_ONNX, TensorType
from subgraph.operators.requirements import decoded
from subgraph.operators.schema import is_before

DTYPES = frozenset((*FLOATS, *INTEGERS, "bool"))
# Dtypes whose values are all exact in float32.
_EXACT_IN_FLOAT32 = (*HALF_FLOATS, "float32", "bool", "int8", "int16", "uint8", "uint16")


class Term(NamedTuple):
    """A value of a program.

    Attributes:
        name: How instructions name it: ``i0`` (input), ``t0`` (result), ``c0`` (number).
        dtype: Its ONNX dtype.
    """

    name: str
    dtype: str


class Expression:
    """A program under construction.

    Attributes:
        instructions: Texts of the instructions, in order.
        dtypes: Dtype of each input.
        numbers: Values of ``c0, c1, ...``, which the kernel reads from its arguments.
    """

    def __init__(self) -> None:
        """Start an empty program."""
        self.instructions: list[str] = []
        self.dtypes: list[str] = []
        self.numbers: list[int | float] = []

    def input(self, dtype: str) -> Term:
        """Add an input and return its term.

        Raises:
            Unsupported: The kernels do not take the dtype.
        """
        if dtype not in DTYPES:
            raise Unsupported(f"elementwise kernels do not take dtype {dtype}")
        self.dtypes.append(dtype)
        return Term(f"i{len(self.dtypes) - 1}", dtype)

    def number(self, value: float, dtype: str) -> Term:
        """Add a number that is an argument of the kernel and return its term.

        Attributes of nodes become such numbers, so that nodes that differ in them share a kernel.
        """
        real = dtype in FLOATS
        self.numbers.append(float(value) if real else int(value))
        return Term(f"c{len(self.numbers) - 1}", dtype)

    def __call__(self, name: str, *operands: Term | float, dtype: str = "") -> Term:
        """Add an instruction and return its result; numbers among the operands become literals.

        Args:
            name: Name of a primitive.
            operands: Its operands; at least one is a term.
            dtype: Dtype in which it computes; "" is that of the first term.
        """
        terms = [o for o in operands if isinstance(o, Term)]
        work = dtype or terms[0].dtype
        texts = [o.name if isinstance(o, Term) else f"#{o!r}" for o in operands]
        self.instructions.append(f"{name}.{compute_dtype(work)} {' '.join(texts)}")
        result = "bool" if name in TO_BOOL else work
        return Term(f"t{len(self.instructions) - 1}", result)

    def cast(self, x: Term, dtype: str) -> Term:
        """Convert to another dtype, with the rounding of a store in that dtype.

        Raises:
            Unsupported: The kernels do not produce the dtype.
        """
        if dtype not in DTYPES:
            raise Unsupported(f"elementwise kernels do not give dtype {dtype}")
        if x.dtype == dtype:
            return x
        name = x.name
        if compute_dtype(x.dtype) != compute_dtype(dtype):
            self.instructions.append(f"cast.{compute_dtype(x.dtype)}.{compute_dtype(dtype)} {name}")
            name = f"t{len(self.instructions) - 1}"
        if dtype in HALF_FLOATS:
            self.instructions.append(f"round_{dtype}.float32 {name}")
            name = f"t{len(self.instructions) - 1}"
        return Term(name, dtype)

    def bits_of_bfloat16(self, x: Term) -> Term:
        """Round a term of float32 to bfloat16, whose bits are uint16: for whole blocks of 16.

        Subnormal numbers may become 0, as they do in products.
        """
        self.instructions.append(f"bits_bfloat16.float32 {x.name}")
        return Term(f"t{len(self.instructions) - 1}", "uint16")

    def power(self, base: Term, exponent: Term) -> Term:
        """Return ``base ** exponent``; an exponent beyond float32 is taken as float64.

        float32 would round an integer beyond 2**24 to an even one, which changes the sign of the
        power of a negative base.
        """
        if exponent.dtype in _EXACT_IN_FLOAT32 or base.dtype == "float64":
            return self(
                "pow", base, self.cast(exponent, compute_dtype(base.dtype)), dtype=base.dtype
            )
        wide = self.cast(exponent, "float64")
        self.instructions.append(f"pow.float64.float32 {base.name} {wide.name}")
        return Term(f"t{len(self.instructions) - 1}", base.dtype)


# Primitives that give bool.
TO_BOOL = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "isnan"})


Expand = Callable[[Expression, Node, list[Term]], Term]


def _single(number: float) -> float:
    """Round to float32, the precision of ONNX attributes."""
    rounded: float = struct.unpack("f", struct.pack("f", number))[0]
    return rounded


def _attribute(node: Node, name: str, default: float) -> float:
    """Return a float attribute of a node, rounded to float32."""
    return _single(float(node.attrs.get(name, default)))


def _real(node: Node, x: Term) -> None:
    """Check that an operand is of a floating-point dtype.

    Raises:
        Unsupported: It is not.
    """
    if x.dtype not in FLOATS:
        raise Unsupported(f"{node.op_type} of {x.dtype}")


def _primitive(name: str) -> Expand:
    """Return the rule of an operator that is one primitive on floating-point numbers."""

    def expand(e: Expression, node: Node, args: list[Term]) -> Term:
        _real(node, args[0])
        return e(name, args[0])

    return expand


def _any_primitive(name: str) -> Expand:
    """Return the rule of an operator that is one primitive on any dtype."""
    return lambda e, node, args: e(name, args[0])


def _binary(name: str) -> Expand:
    """Return the rule of an operator that is one primitive of two operands."""
    return lambda e, node, args: e(name, args[0], args[1])


def _folded(name: str) -> Expand:
    """Return the rule of an operator that combines any number of operands by one primitive."""

    def expand(e: Expression, node: Node, args: list[Term]) -> Term:
        result = args[0]
        for other in args[1:]:
            result = e(name, result, other)
        return result

    return expand


def _same(e: Expression, node: Node, args: list[Term]) -> Term:
    return args[0]


def _mean(e: Expression, node: Node, args: list[Term]) -> Term:
    _real(node, args[0])
    total = _folded("add")(e, node, args)
    return total if len(args) == 1 else e("div", total, float(len(args)))


def _mod(e: Expression, node: Node, args: list[Term]) -> Term:
    return e("fmod" if node.attrs.get("fmod", 0) else "mod", args[0], args[1])


def _pow(e: Expression, node: Node, args: list[Term]) -> Term:
    base, exponent = args
    if base.dtype in FLOATS:
        return e.power(base, exponent)
    wide = "float64" if exponent.dtype in FLOATS else "int64"
    if base.dtype == exponent.dtype:
        return e("pow", base, exponent)
    return e.cast(e("pow", e.cast(base, wide), e.cast(exponent, wide)), base.dtype)


def _bit_shift(e: Expression, node: Node, args: list[Term]) -> Term:
    return e("shl" if decoded(node.attrs["direction"]) == "LEFT" else "shr", args[0], args[1])


def _prelu(e: Expression, node: Node, args: list[Term]) -> Term:
    x, slope = args
    return e("where", e("lt", x, 0), e("mul", x, slope), x, dtype=x.dtype)


def _leaky_relu(e: Expression, node: Node, args: list[Term]) -> Term:
    x = args[0]
    alpha = e.number(_attribute(node, "alpha", 0.01), x.dtype)
    return e("where", e("lt", x, 0), e("mul", x, alpha), x, dtype=x.dtype)


def _elu(e: Expression, node: Node, args: list[Term]) -> Term:
    x = args[0]
    alpha = e.number(_attribute(node, "alpha", 1.0), x.dtype)
    return e("where", e("lt", x, 0), e("mul", e("expm1", x), alpha), x, dtype=x.dtype)


def _selu(e: Expression, node: Node, args: list[Term]) -> Term:
    x = args[0]
    old = is_before(node, 6)
    alpha = e.number(_attribute(node, "alpha", 1.6732 if old else 1.67326319217681884), x.dtype)
    gamma = e.number(_attribute(node, "gamma", 1.0507 if old else 1.05070102214813232), x.dtype)
    curved = e("mul", e("expm1", x), alpha)
    return e("mul", e("where", e("le", x, 0), curved, x, dtype=x.dtype), gamma)


def _celu(e: Expression, node: Node, args: list[Term]) -> Term:
    x = args[0]
    alpha = e.number(_attribute(node, "alpha", 1.0), x.dtype)
    curved = e("mul", e("expm1", e("div", x, alpha)), alpha)
    return e("add", e("max", x, 0), e("min", curved, 0))


def _gelu(e: Expression, node: Node, args: list[Term]) -> Term:
    x = args[0]
    _real(node, x)
    if decoded(node.attrs.get("approximate", "none")) != "tanh":
        return e("gelu", x)
    # x / 2 * (1 + tanh(u)) is x * sigmoid(2 u).
    inner = e("add", e("mul", e("mul", e("mul", x, x), x), 0.044715), x)
    return e("mul", x, e("sigmoid", e("mul", inner, 2.0 * math.sqrt(2.0 / math.pi))))


def _hard_sigmoid(e: Expression, node: Node, args: list[Term]) -> Term:
    x = args[0]
    alpha = e.number(_attribute(node, "alpha", 0.2), x.dtype)
    beta = e.number(_attribute(node, "beta", 0.5), x.dtype)
    return e("max", e("min", e("add", e("mul", x, alpha), beta), 1), 0)


def _hard_swish(e: Expression, node: Node, args: list[Term]) -> Term:
    x = args[0]
    gate = e("add", e("mul", x, _single(1.0 / 6.0)), 0.5)
    return e("mul", x, e("max", e("min", gate, 1), 0))


def _mish(e: Expression, node: Node, args: list[Term]) -> Term:
    # tanh(log(1 + e**x)) is n / (n + 2) with n = e**x (e**x + 2). From x = 20 on it rounds to 1 in
    # float32, from 40 on in float64; the bound keeps e**x finite.
    x = args[0]
    _real(node, x)
    power = e("exp", e("min", x, 40.0 if x.dtype == "float64" else 20.0))
    n = e("mul", power, e("add", power, 2.0))
    return e("mul", x, e("div", n, e("add", n, 2.0)))


def _swish(e: Expression, node: Node, args: list[Term]) -> Term:
    x = args[0]
    alpha = _attribute(node, "alpha", 1.0)
    if alpha == 1.0:
        return e("silu", x)
    return e("mul", x, e("sigmoid", e("mul", x, e.number(alpha, x.dtype))))


def _softsign(e: Expression, node: Node, args: list[Term]) -> Term:
    _real(node, args[0])
    return e("div", args[0], e("add", e("abs", args[0]), 1))


def _thresholded_relu(e: Expression, node: Node, args: list[Term]) -> Term:
    x = args[0]
    alpha = e.number(_attribute(node, "alpha", 1.0), x.dtype)
    return e("where", e("gt", x, alpha), x, 0, dtype=x.dtype)


def _shrink(e: Expression, node: Node, args: list[Term]) -> Term:
    x = args[0]
    _real(node, x)
    lambd = _attribute(node, "lambd", 0.5)
    bias = e.number(_attribute(node, "bias", 0.0), x.dtype)
    above = e("gt", x, e.number(lambd, x.dtype))
    below = e("lt", x, e.number(-lambd, x.dtype))
    upper = e("where", above, e("sub", x, bias), 0, dtype=x.dtype)
    return e("where", below, e("add", x, bias), upper, dtype=x.dtype)


def _clip(e: Expression, node: Node, args: list[Term]) -> Term:
    # As in numpy.clip: the lower bound is applied first, and NaN stays NaN.
    x = args[0]
    if is_before(node, 11):
        least, most = node.attrs.get("min"), node.attrs.get("max")
        bounds = [None if b is None else e.number(float(b), x.dtype) for b in (least, most)]
    else:
        bound_terms = iter(args[1:])
        present = [k < len(node.inputs) and node.inputs[k] is not None for k in (1, 2)]
        bounds = [next(bound_terms) if there else None for there in present]
    if bounds[0] is not None:
        x = e("max", x, bounds[0])
    return x if bounds[1] is None else e("min", x, bounds[1])


def _cast(e: Expression, node: Node, args: list[Term]) -> Term:
    to = node.attrs["to"]
    return e.cast(args[0], to.lower() if isinstance(to, str) else DTYPE_OF_ONNX[int(to)])


def _cast_like(e: Expression, node: Node, args: list[Term]) -> Term:
    return e.cast(args[0], args[1].dtype)


def _is_inf(e: Expression, node: Node, args: list[Term]) -> Term:
    x = args[0]
    positive, negative = (node.attrs.get(f"detect_{s}", 1) for s in ("positive", "negative"))
    if positive and negative:
        return e("eq", e("abs", x), math.inf)
    if not positive and not negative:
        return e("lt", x, -math.inf)
    return e("eq", x, math.inf if positive else -math.inf)


def _where(e: Expression, node: Node, args: list[Term]) -> Term:
    return e("where", *args, dtype=args[1].dtype)


EXPANSIONS: dict[str, Expand] = {
    "Add": _binary("add"),
    "Sub": _binary("sub"),
    "Mul": _binary("mul"),
    "Div": _binary("div"),
    "Mod": _mod,
    "Pow": _pow,
    "And": _binary("and"),
    "Or": _binary("or"),
    "Xor": _binary("xor"),
    "BitwiseAnd": _binary("and"),
    "BitwiseOr": _binary("or"),
    "BitwiseXor": _binary("xor"),
    "BitShift": _bit_shift,
    "Equal": _binary("eq"),
    "Greater": _binary("gt"),
    "GreaterOrEqual": _binary("ge"),
    "Less": _binary("lt"),
    "LessOrEqual": _binary("le"),
    "Max": _folded("max"),
    "Min": _folded("min"),
    "Sum": _folded("add"),
    "Mean": _mean,
    "Where": _where,
    "Cast": _cast,
    "CastLike": _cast_like,
    "Clip": _clip,
    "IsInf": _is_inf,
    "IsNaN": _primitive("isnan"),
    "PRelu": _prelu,
    "Identity": _same,
    "Relu": lambda e, node, args: e("max", args[0], 0),
    "LeakyRelu": _leaky_relu,
    "Elu": _elu,
    "Selu": _selu,
    "Celu": _celu,
    "Gelu": _gelu,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _hard_swish,
    "Mish": _mish,
    "Swish": _swish,
    "Softsign": _softsign,
    "Shrink": _shrink,
    "ThresholdedRelu": _thresholded_relu,
    "Not": _any_primitive("not"),
    "BitwiseNot": _any_primitive("not"),
    "Abs": _any_primitive("abs"),
    "Neg": _any_primitive("neg"),
    "Sign": _any_primitive("sign"),
    "Reciprocal": _primitive("recip"),
    "Round": _primitive("rint"),
    **{
        name: _primitive(name.lower())
        for name in [
            "Acos",
            "Acosh",
            "Asin",
            "Asinh",
            "Atan",
            "Atanh",
            "Ceil",
            "Cos",
            "Cosh",
            "Erf",
            "Exp",
            "Floor",
            "Log",
            "Sigmoid",
            "Sin",
            "Sinh",
            "Softplus",
            "Sqrt",
            "Tan",
            "Tanh",
        ]
    },
}


def _quantize(e: Expression, node: Node, args: list[Term]) -> Term:
    """Return round(x / scale) + zero point, saturated to 8 bits."""
    dtype = dtype_of_value(node.outputs[0])
    least, most = (-128.0, 127.0) if dtype == "int8" else (0.0, 255.0)
    rounded = e("rint", e("div", args[0], args[1]))
    if len(args) > 2:
        rounded = e("add", rounded, e.cast(args[2], "float32"))
    return e.cast(e("max", e("min", rounded, most), least), dtype)


def _dequantize(e: Expression, node: Node, args: list[Term]) -> Term:
    """Return (x - zero point) * scale."""
    value = e.cast(args[0], "float32")
    if len(args) > 2:
        value = e("sub", value, e.cast(args[2], "float32"))
    return e("mul", value, args[1])


# Only inside fused chains, which admit them between 8-bit integers and float32, with one scale.
CONVERSIONS: dict[str, Expand] = {"QuantizeLinear": _quantize, "DequantizeLinear": _dequantize}


def expand(e: Expression, node: Node, args: Sequence[Term]) -> Term:
    """Add the operator of ``node`` to a program and return the term of its result.

    Args:
        e: The program.
        node: A node of an elementwise operator.
        args: Terms of the node's inputs, in order, without omitted ones.

    Raises:
        Unsupported: The operator is not elementwise, or its dtype is not supported.
    """
    rules = EXPANSIONS if node.op_type in EXPANSIONS else CONVERSIONS
    rule = rules.get(node.op_type) if node.domain == "" else None
    if rule is None:
        raise Unsupported(f"{node.op_type} is no elementwise operator")
    return rule(e, node, list(args))


def expand_graph(e: Expression, graph: Graph, inputs: Sequence[Term]) -> list[Term]:
    """Add all nodes of a graph of elementwise operators to a program.

    Args:
        e: The program.
        graph: The inner graph of a fused node.
        inputs: Terms of the graph's inputs.

    Returns:
        The terms of the graph's outputs.

    Raises:
        Unsupported: A node is not elementwise, or a dtype is not supported.
    """
    terms: dict[Value, Term] = dict(zip(graph.inputs, inputs, strict=True))
    for node in graph.nodes:
        args = [_term(terms, value) for value in node.inputs if value is not None]
        if node.op_type == "Constant":
            raise Unsupported("a Constant inside a fused chain; make it an input")
        terms[node.outputs[0]] = expand(e, node, args)
    return [_term(terms, value) for value in graph.outputs]


def _term(terms: dict[Value, Term], value: Value) -> Term:
    found = terms.get(value)
    if found is None:
        raise Unsupported(f"value {value.name!r} does not come from inside the fused chain")
    return found


_COMMUTATIVE = frozenset({"add", "mul", "and", "or", "xor", "eq", "ne"})


def canonical_order(
    instructions: Sequence[str], kinds: Sequence[str]
) -> tuple[tuple[str, ...], list[int]]:
    """Rewrite a program so that programs which compute the same function share a compiled kernel.

    Operands of commutative instructions are sorted, and inputs are numbered by first use.

    Args:
        instructions: The program.
        kinds: How each input is read (`kernels.run`, ``modes``). Of two inputs that may be swapped
            the one whose letter comes later in the alphabet comes first.

    Returns:
        The rewritten program, and for each input of it the old number of that input.
    """
    place: dict[str, int] = {}
    written: list[str] = []

    def rank(operand: str) -> tuple[int, int, int]:
        group = "tic#".index(operand[0])
        if group != 1:
            return group, 0, 0
        return group, -ord(kinds[int(operand[1:])]), int(operand[1:])

    for instruction in instructions:
        head, *operands = instruction.split(" ")
        if head.split(".", 1)[0] in _COMMUTATIVE and len(operands) == 2:
            operands.sort(key=rank)
        for k, operand in enumerate(operands):
            if operand[0] == "i":
                operands[k] = f"i{place.setdefault(operand, len(place))}"
        written.append(" ".join([head, *operands]))
    for k in range(len(kinds)):
        place.setdefault(f"i{k}", len(place))
    return tuple(written), [int(name[1:]) for name in place]


def dtype_of_value(value: Value) -> str:
    """Return the dtype of a tensor value, "" while it is unknown."""
    return value.type.dtype if isinstance(value.type, TensorType) else ""

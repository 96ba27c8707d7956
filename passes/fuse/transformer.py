"""The property "cpu_transformer": GELU, LayerNorm, RMSNorm, softmax and attention as chains.

Exporters write these as primitives, each in a few ways; a match becomes the standard's operator
with the chain as its inner graph. Constants among them are read, so the result depends on them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from subgraph.graph.graph import Node, Value
from subgraph.passes._patterns import (
    FLOATS,
    Context,
    Match,
    dtype_of,
    is_op,
    pattern,
    produced_by,
    shape_of,
)

from . import activations as fuse_activations

_TOLERANCE = 1e-4
Polynomial = dict[int, float]


def _near(a: float | None, b: float) -> bool:
    return a is not None and abs(a - b) <= _TOLERANCE * max(1.0, abs(b))


# ---------------------------------------------------------------- GELU


@pattern("activation", ("Erf",), ("Tanh",))
def gelu(context: Context, node: Node) -> Match | None:
    """Match ``0.5 x (1 + erf(x / sqrt(2)))`` and ``0.5 x (1 + tanh(...))`` at Erf or Tanh."""
    if not is_op(node, "Erf", "Tanh") or dtype_of(node.outputs[0]) not in FLOATS:
        return None
    plus_one = context.user(node.outputs[0])
    if not is_op(plus_one, "Add") or plus_one is None:
        return None
    if not _near(context.scalar(context.other(plus_one, node.outputs[0])), 1.0):
        return None
    product = _product(context, plus_one)
    if product is None:
        return None
    x, after = product
    inside = _polynomial(context, node.inputs[0], x)
    if inside is None:
        return None
    coefficients, before = inside
    if node.op_type == "Erf":
        exact = _is(coefficients, {1: math.sqrt(0.5)})
        mode = "none"
    else:
        slope = math.sqrt(2 / math.pi)
        exact = _is(coefficients, {1: slope, 3: slope * 0.044715})
        mode = "tanh"
    if not exact:
        return None
    nodes = (*before, node, plus_one, *after)
    return fuse_activations.activation(nodes, "Gelu", x, version=20, approximate=mode)


def _is(found: Polynomial, wanted: Polynomial) -> bool:
    powers = {*found, *wanted}
    return all(abs(found.get(p, 0.0) - wanted.get(p, 0.0)) < 1e-5 for p in powers)


def _product(context: Context, start: Node) -> tuple[Value, list[Node]] | None:
    """Follow multiplications by x and by numbers that make 0.5 together; return x and the nodes."""
    at, factor, x = start.outputs[0], 1.0, None
    nodes: list[Node] = []
    extra: list[Node] = []
    while True:
        user = context.user(at)
        if user is None or not is_op(user, "Mul"):
            return None
        other = context.other(user, at)
        number = context.scalar(other)
        if number is not None:
            factor *= number
        elif x is None and other is not None:
            x = other
            half = produced_by(other, "Mul")
            if half is not None and context.user(other) is user and not _near(factor, 0.5):
                scaled = _scaled(context, half)
                if scaled is not None and _near(scaled[1] * factor, 0.5):
                    x, factor = scaled[0], factor * scaled[1]
                    extra.append(half)
        else:
            return None
        nodes.append(user)
        at = user.outputs[0]
        if x is not None and _near(factor, 0.5):
            return x, [*extra, *nodes]


def _scaled(context: Context, node: Node) -> tuple[Value, float] | None:
    """Take ``x * number`` apart."""
    for k in (0, 1):
        number = context.scalar(node.inputs[1 - k])
        value = node.inputs[k]
        if number is not None and value is not None:
            return value, number
    return None


def _polynomial(
    context: Context, value: Value | None, x: Value
) -> tuple[Polynomial, list[Node]] | None:
    """Read a small expression in x as a polynomial; return its nodes in topological order."""
    nodes: dict[Node, None] = {}

    def read(value: Value | None, depth: int) -> Polynomial | None:
        if value is x:
            return {1: 1.0}
        number = context.scalar(value)
        if number is not None:
            return {0: number}
        node = produced_by(value, "Add", "Mul", "Div", "Pow", "Sub")
        if node is None or depth > 8:
            return None
        a, b = (read(v, depth + 1) for v in node.inputs)
        if a is None or b is None:
            return None
        nodes[node] = None
        return _combined(node.op_type, a, b)

    found = read(value, 0)
    return None if found is None else (found, list(nodes))


def _combined(op_type: str, a: Polynomial, b: Polynomial) -> Polynomial | None:
    if op_type in ("Add", "Sub"):
        sign = 1.0 if op_type == "Add" else -1.0
        return {p: a.get(p, 0.0) + sign * b.get(p, 0.0) for p in {*a, *b}}
    if op_type == "Mul":
        return _times(a, b)
    if set(b) != {0}:
        return None
    if op_type == "Div":
        return {p: c / b[0] for p, c in a.items()} if b[0] else None
    power = b[0]
    if power not in (1.0, 2.0, 3.0):
        return None
    result = a
    for _ in range(int(power) - 1):
        result = _times(result, a)
    return result


def _times(a: Polynomial, b: Polynomial) -> Polynomial:
    result: Polynomial = {}
    for p, c in a.items():
        for q, d in b.items():
            result[p + q] = result.get(p + q, 0.0) + c * d
    return result


# ---------------------------------------------------------------- normalizations


def _last_axes(context: Context, node: Node, rank: int) -> int | None:
    """Return the first of the trailing axes over which a reduction that keeps dimensions runs."""
    if not node.attrs.get("keepdims", 1):
        return None
    axes = node.attrs.get("axes")
    if axes is None and len(node.inputs) > 1:
        array = context.array(node.inputs[1])
        axes = None if array is None else array.reshape(-1).tolist()
    if axes is None:
        return None
    counted = sorted(int(axis) % rank for axis in axes)
    first = rank - len(counted)
    return first if counted == list(range(first, rank)) and counted else None


def _square(node: Node, context: Context, value: Value) -> bool:
    if is_op(node, "Pow"):
        return node.inputs[0] is value and _near(context.scalar(node.inputs[1]), 2.0)
    return is_op(node, "Mul") and node.inputs == (value, value)


def _root(context: Context, square: Node, axis: int) -> tuple[list[Node], float, Node] | None:
    """Follow square, mean, plus epsilon, root; return the nodes, epsilon and the root's node."""
    mean = context.user(square.outputs[0])
    rank = len(shape_of(square.outputs[0]) or ())
    if mean is None or not is_op(mean, "ReduceMean") or _last_axes(context, mean, rank) != axis:
        return None
    plus = context.user(mean.outputs[0])
    if plus is None or not is_op(plus, "Add"):
        return None
    epsilon = context.scalar(context.other(plus, mean.outputs[0]))
    root = context.user(plus.outputs[0])
    if epsilon is None or root is None or not is_op(root, "Sqrt"):
        return None
    return [square, mean, plus, root], epsilon, root


def _normalized(context: Context, root: Node, centered: Value) -> list[Node] | None:
    """Follow ``centered / root`` or ``centered * (1 / root)``."""
    user = context.user(root.outputs[0])
    if user is None:
        return None
    if is_op(user, "Div") and user.inputs == (centered, root.outputs[0]):
        return [user]
    inverse = is_op(user, "Div") and _near(context.scalar(user.inputs[0]), 1.0)
    if inverse or is_op(user, "Reciprocal"):
        after = context.user(user.outputs[0])
    else:
        return None
    if after is None or not is_op(after, "Mul"):
        return None
    return [user, after] if context.other(after, user.outputs[0]) is centered else None


def _weighted(context: Context, at: Value, op_type: str, axis: int) -> tuple[Node, Value] | None:
    """Follow the multiplication by, or addition of, a weight over the trailing axes."""
    user = context.user(at)
    if user is None or not is_op(user, op_type):
        return None
    weight = context.other(user, at)
    whole, part = shape_of(at), shape_of(weight)
    if weight is None or not context.is_weight(weight) or whole is None or part is None:
        return None
    return (user, weight) if part == whole[axis:] else None


@pattern("transformer", ("ReduceMean",))
def layer_norm(context: Context, node: Node) -> Match | None:
    """Match ``(x - mean) / sqrt(mean((x - mean)^2) + epsilon) * scale + bias`` at its mean."""
    if not is_op(node, "ReduceMean") or dtype_of(node.outputs[0]) not in FLOATS:
        return None
    x = node.inputs[0]
    rank = len(shape_of(x) or ())
    axis = _last_axes(context, node, rank) if rank else None
    if x is None or axis is None:
        return None
    subs = [u for u in node.outputs[0].consumers if is_op(u, "Sub")]
    if len(subs) != len(node.outputs[0].consumers) or not subs:
        return None
    if any(sub.inputs != (x, node.outputs[0]) for sub in subs) or len(subs) > 2:
        return None
    for sub in subs:
        centered = sub.outputs[0]
        square = next((u for u in centered.consumers if _square(u, context, centered)), None)
        if square is None:
            continue
        top = subs[0] if len(subs) == 1 or subs[1] is sub else subs[1]
        found = _root(context, square, axis)
        if found is None:
            return None
        chain, epsilon, root = found
        division = _normalized(context, root, top.outputs[0])
        if division is None:
            return None
        return _affine_norm(context, [node, *subs, *chain, *division], x, axis, epsilon)
    return None


def _affine_norm(
    context: Context, nodes: list[Node], x: Value, axis: int, epsilon: float
) -> Match | None:
    scaled = _weighted(context, nodes[-1].outputs[0], "Mul", axis)
    if scaled is None:
        return None
    nodes.append(scaled[0])
    inputs = [x, scaled[1]]
    shifted = _weighted(context, scaled[0].outputs[0], "Add", axis)
    if shifted is not None:
        nodes.append(shifted[0])
        inputs.append(shifted[1])
    attributes = {"axis": axis, "epsilon": epsilon, "stash_type": 1}
    return Match(
        tuple(nodes), "LayerNormalization", tuple(inputs), attributes, "", version=17, arity=3
    )


@pattern("transformer", ("ReduceMean",))
def rms_norm(context: Context, node: Node) -> Match | None:
    """Match ``x / sqrt(mean(x^2) + epsilon) * scale`` at the square."""
    x = node.inputs[0] if node.inputs else None
    if x is None or not _square(node, context, x) or dtype_of(x) not in FLOATS:
        return None
    mean = context.user(node.outputs[0])
    rank = len(shape_of(x) or ())
    if mean is None or not rank or not is_op(mean, "ReduceMean"):
        return None
    axis = _last_axes(context, mean, rank)
    found = None if axis is None else _root(context, node, axis)
    if found is None or axis is None:
        return None
    chain, epsilon, root = found
    division = _normalized(context, root, x)
    if division is None:
        return None
    scaled = _weighted(context, division[-1].outputs[0], "Mul", axis)
    if scaled is None:
        return None
    return Match(
        (*chain, *division, scaled[0]),
        "RMSNormalization",
        (x, scaled[1]),
        {"axis": axis, "epsilon": epsilon, "stash_type": 1},
        domain="",
        version=23,
        arity=2,
    )


@pattern("transformer", ("ReduceMax", "Exp"))
def softmax(context: Context, node: Node) -> Match | None:
    """Match ``exp(x - max) / sum(exp(x - max))`` at the maximum."""
    if not is_op(node, "ReduceMax") or dtype_of(node.outputs[0]) not in FLOATS:
        return None
    x = node.inputs[0]
    rank = len(shape_of(x) or ())
    axis = _last_axes(context, node, rank) if rank else None
    minus = context.user(node.outputs[0])
    if axis is None or axis != rank - 1 or minus is None or not is_op(minus, "Sub"):
        return None
    exp = context.user(minus.outputs[0])
    if minus.inputs != (x, node.outputs[0]) or exp is None or not is_op(exp, "Exp"):
        return None
    power = exp.outputs[0]
    total = next((u for u in power.consumers if is_op(u, "ReduceSum")), None)
    if total is None or _last_axes(context, total, rank) != axis:
        return None
    div = context.user(total.outputs[0])
    if div is None or not is_op(div, "Div") or div.inputs != (power, total.outputs[0]):
        return None
    nodes = (node, minus, exp, total, div)
    return Match(nodes, "Softmax", (x,), {"axis": -1}, domain="", version=13, arity=1)


# ---------------------------------------------------------------- attention


@pattern("transformer", ("Softmax", "MatMul"))
def attention(context: Context, node: Node) -> Match | None:
    """Match scaled dot-product attention at its Softmax, with the split of heads around it."""
    if not is_op(node, "Softmax") or dtype_of(node.outputs[0]) not in FLOATS:
        return None
    scores = node.inputs[0]
    rank = len(shape_of(scores) or ())
    axis = int(node.attrs.get("axis", -1 if node.version >= 13 else 1))
    if rank not in (3, 4) or axis not in (-1, rank - 1):
        return None
    found = _scores(context, scores)
    weighted = context.user(node.outputs[0])
    if found is None or weighted is None or not is_op(weighted, "MatMul"):
        return None
    if weighted.inputs[0] is not node.outputs[0]:
        return None
    q, k, v = found.q, found.k, weighted.inputs[1]
    nodes = [*found.nodes, node, weighted]
    split = _split_heads(context, q, found.k_transpose, v, weighted) if rank == 4 else None
    if split is None:
        if k is None or (rank == 3 and not _is_one_head(q, k, v, found.mask)):
            return None
        inputs: Sequence[Value | None] = (q, k, v, found.mask)
        attributes: dict[str, object] = {"scale": found.scale}
        if rank == 3:
            attributes |= {"q_num_heads": 1, "kv_num_heads": 1}
        ordered = _ordered([*found.k_nodes, *nodes])
        return Match(
            tuple(ordered), "Attention", tuple(inputs), attributes, "", version=23, arity=7
        )
    return Match(
        tuple(_ordered([*split.nodes, *nodes])),
        "Attention",
        (*split.inputs, found.mask),
        {"scale": found.scale, "q_num_heads": split.heads, "kv_num_heads": split.heads},
        "",
        version=23,
        arity=7,
    )


def _is_one_head(q: Value | None, k: Value, v: Value | None, mask: Value | None) -> bool:
    """Return whether batches of matrices are attention of one head each."""
    shapes: list[Sequence[object]] = [shape_of(value) or () for value in (q, k, v)]
    if any(len(shape) != 3 or shape[0] != shapes[0][0] for shape in shapes):
        return False
    # A mask of three dimensions would be one for each head.
    return mask is None or len(shape_of(mask) or ()) == 2


class _Scores:
    """What is below a softmax: Q, K, the mask and the scale."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.scale = 1.0
        self.mask: Value | None = None
        self.q: Value | None = None
        self.k: Value | None = None  # [B, H, S, D], where K is transposed by itself
        self.k_nodes: list[Node] = []
        self.k_transpose: Value | None = None  # [B, H, D, S]


def _scores(context: Context, value: Value | None) -> _Scores | None:
    found = _Scores()
    node = produced_by(value, "Add", "Mul", "Div", "MatMul")
    if is_op(node, "Add") and node is not None:
        inner = _operand_from(node, ("Mul", "Div", "MatMul"))
        if inner is None:
            return None
        found.nodes.append(node)
        found.mask = context.other(node, inner)
        rank = len(shape_of(found.mask) or ())
        if not 2 <= rank <= 4 or dtype_of(found.mask) != dtype_of(inner):
            return None
        node = inner.producer
    if node is not None and is_op(node, "Mul", "Div"):
        inner = _operand_from(node, ("MatMul",))
        number = None if inner is None else context.scalar(context.other(node, inner))
        if inner is None or number is None or (is_op(node, "Div") and node.inputs[0] is not inner):
            return None
        found.scale *= number if node.op_type == "Mul" else 1.0 / number
        found.nodes.append(node)
        node = inner.producer
    if node is None or not is_op(node, "MatMul"):
        return None
    found.nodes.append(node)
    found.q = _unscaled(context, node.inputs[0], found)
    found.k_transpose = _unscaled(context, node.inputs[1], found)
    turn = produced_by(found.k_transpose, "Transpose")
    if turn is not None and tuple(turn.attrs.get("perm", ())) in ((0, 1, 3, 2), (0, 2, 1)):
        found.k, found.k_nodes = turn.inputs[0], [turn]
    return found


def _operand_from(node: Node, op_types: Iterable[str]) -> Value | None:
    for value in node.inputs:
        if produced_by(value, *op_types) is not None:
            return value
    return None


def _unscaled(context: Context, value: Value | None, found: _Scores) -> Value | None:
    """Look through a multiplication by a number, which joins the scale."""
    node = produced_by(value, "Mul")
    if node is None:
        return value
    scaled = _scaled(context, node)
    if scaled is None:
        return value
    found.scale *= scaled[1]
    found.nodes.append(node)
    return scaled[0]


class _Split:
    """Attention with heads inside the last dimension: inputs [B, T, H * D]."""

    def __init__(self, heads: int) -> None:
        self.heads = heads
        self.inputs: list[Value] = []
        self.nodes: list[Node] = []

    def take(self, value: Value | None, perms: Sequence[tuple[int, ...]]) -> bool:
        """Look through Transpose and Reshape from [B, T, H * D] to heads."""
        turn = produced_by(value, "Transpose")
        if turn is None or tuple(turn.attrs.get("perm", ())) not in perms:
            return False
        nodes = [turn]
        if tuple(turn.attrs["perm"]) == (0, 1, 3, 2):
            turn = produced_by(turn.inputs[0], "Transpose")
            if turn is None or tuple(turn.attrs.get("perm", ())) != (0, 2, 1, 3):
                return False
            nodes.append(turn)
        shape = produced_by(turn.inputs[0], "Reshape")
        parts = shape_of(turn.inputs[0])
        source = None if shape is None else shape.inputs[0]
        whole = shape_of(source)
        if shape is None or source is None or parts is None or whole is None:
            return False
        if len(whole) != 3 or len(parts) != 4 or parts[2] != self.heads:
            return False
        size, width = parts[3], whole[2]
        if not isinstance(size, int) or width != self.heads * size or parts[:2] != whole[:2]:
            return False
        self.inputs.append(source)
        self.nodes += [*nodes, shape]
        return True


def _split_heads(
    context: Context, q: Value | None, k: Value | None, v: Value | None, weighted: Node
) -> _Split | None:
    shape = shape_of(q)
    heads = None if shape is None else shape[1]
    if not isinstance(heads, int):
        return None
    split = _Split(heads)
    merge = [(0, 2, 1, 3)]
    if not split.take(q, merge) or not split.take(k, [(0, 2, 3, 1), (0, 1, 3, 2)]):
        return None
    if not split.take(v, merge):
        return None
    turn = context.user(weighted.outputs[0])
    if turn is None or not is_op(turn, "Transpose"):
        return None
    if tuple(turn.attrs.get("perm", ())) != (0, 2, 1, 3):
        return None
    joined = context.user(turn.outputs[0])
    if joined is None or not is_op(joined, "Reshape"):
        return None
    whole, parts = shape_of(joined.outputs[0]), shape_of(turn.outputs[0])
    if whole is None or parts is None or len(whole) != 3 or whole[:2] != parts[:2]:
        return None
    split.nodes += [turn, joined]
    return split


def _ordered(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes, each once, in the order in which the graph has them."""
    unique = list(dict.fromkeys(nodes))
    members = set(unique)
    graph = unique[0].graph
    assert graph is not None
    order: list[Node] = []
    done: set[Node] = set()
    stack = list(reversed(unique))
    while stack:
        node = stack[-1]
        waiting = [p for p in node.predecessors() if p in members and p not in done]
        if waiting and node not in done:
            stack += waiting
            continue
        stack.pop()
        if node not in done:
            done.add(node)
            order.append(node)
    return order

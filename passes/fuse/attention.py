"""Scaled dot-product attention from primitives: a pattern of the property "cpu_transformer".

A match becomes the standard's Attention with the chain of primitives as its inner graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from subgraph.graph.graph import Node, Value
from subgraph.operators.schema import is_before
from subgraph.passes.patterns import (
    Context,
    Match,
    dtype_of,
    is_op,
    pattern,
    produced_by,
    shape_of,
)


@pattern("transformer", "Softmax", needs=("MatMul",))
def attention(context: Context, node: Node) -> Match | None:
    """Match scaled dot-product attention at its Softmax.

    With heads inside the last dimension, [B, T, H * D], the match includes the Reshape and
    Transpose nodes that split and join them.
    """
    scores = node.inputs[0]
    rank = len(shape_of(scores) or ())
    # Before opset 13, Softmax flattens all dimensions from its axis on, which is the same for the
    # last axis only; its default axis was 1.
    axis = int(node.attrs.get("axis", 1 if is_before(node, 13) else -1))
    if rank not in (3, 4) or axis not in (-1, rank - 1):
        return None
    found = _scores(context, scores)
    cleared = _cleared(context, node.outputs[0])
    weights = cleared[-1].outputs[0] if cleared else node.outputs[0]
    weighted = context.sole_user(weights, "MatMul")
    if found is None or weighted is None or weighted.inputs[0] is not weights:
        return None
    q, k, v = found.q, found.k, weighted.inputs[1]
    split = _split_heads(context, q, found.k_transpose, v, weighted) if rank == 4 else None
    if split is not None:
        inputs: Sequence[Value | None] = split.inputs
        own, heads = split.nodes, split.heads
    else:
        # Without a transposition before the product, K itself does not exist in the graph.
        if k is None or (rank == 3 and not _is_one_head(q, k, v, found.mask)):
            return None
        inputs, own, heads = (q, k, v), found.k_nodes, 1 if rank == 3 else 0
    attributes: dict[str, object] = {"scale": found.scale}
    if found.softcap:
        attributes["softcap"] = found.softcap
    if heads:
        attributes |= {"q_num_heads": heads, "kv_num_heads": heads}
    if cleared:
        attributes["zero_unseen"] = 2
    nodes = context.ordered([*own, *found.nodes, node, *cleared, weighted])
    return Match(nodes, "Attention", (*inputs, found.mask), attributes, "", version=23, arity=7)


def _cleared(context: Context, weights: Value) -> list[Node]:
    """Return the nodes that replace weights of NaN by 0, as PyTorch exports; [] without any.

    A Softmax is NaN in a whole row: of a query that sees no key, or of one with a score of NaN.
    """
    tests = [user for user in weights.uses if is_op(user, "IsNaN")]
    choice = context.sole_user(tests[0].outputs[0], "Where") if len(tests) == 1 else None
    if choice is None or len(weights.uses) != 2 or context.graph.is_output(weights):
        return []
    if choice.inputs[2] is not weights or context.scalar(choice.inputs[1]) != 0:
        return []
    if shape_of(choice.outputs[0]) != shape_of(weights):
        return []
    return [tests[0], choice]


def _is_one_head(q: Value | None, k: Value, v: Value | None, mask: Value | None) -> bool:
    """Return whether Q, K and V of rank 3 are attention with one head."""
    shapes: list[Sequence[object]] = [shape_of(value) or () for value in (q, k, v)]
    if any(len(shape) != 3 or shape[0] != shapes[0][0] for shape in shapes):
        return False
    # A mask of three dimensions would be one for each head.
    return mask is None or len(shape_of(mask) or ()) == 2


class _Scores:
    """The computation of the scores before a softmax: scale * Q @ K^T + mask.

    Attributes:
        nodes: Its nodes, without a transposition of K.
        scale: The product of all constant factors.
        softcap: Bound c of ``c * tanh(scaled / c)``, before the mask is added; 0: none.
        mask: The added mask, or None.
        q: Q, [B, H, T, D] or [B, T, D].
        k: K before a transposition of its own, [B, H, S, D] or [B, S, D]; None without one.
        k_nodes: That transposition.
        k_transpose: The right operand of the product, [B, H, D, S] or [B, D, S].
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.scale = 1.0
        self.softcap = 0.0
        self.mask: Value | None = None
        self.q: Value | None = None
        self.k: Value | None = None
        self.k_nodes: list[Node] = []
        self.k_transpose: Value | None = None


def _scores(context: Context, value: Value | None) -> _Scores | None:
    found = _Scores()
    node = produced_by(value, "Add", "Mul", "Div", "MatMul")
    if is_op(node, "Add") and node is not None:
        inner = _operand_from(node, ("Mul", "Div", "MatMul"))
        if inner is None:
            return None
        found.nodes.append(node)
        found.mask = context.other_operand(node, inner)
        rank = len(shape_of(found.mask) or ())
        # A boolean mask means something else to Attention than a sum, and other ranks do not
        # broadcast to the scores alike.
        if not 2 <= rank <= 4 or dtype_of(found.mask) != dtype_of(inner):
            return None
        node = inner.producer
    node = _unbounded(context, node, found)
    if node is not None and is_op(node, "Mul", "Div"):
        inner = _operand_from(node, ("MatMul",))
        number = None if inner is None else context.scalar(context.other_operand(node, inner))
        if inner is None or number is None:
            return None
        if node.op_type == "Div":
            # A number divided by the scores is no scale, and 1 / 0 is none.
            if node.inputs[0] is not inner or not number:
                return None
            number = 1.0 / number
        found.scale *= number
        found.nodes.append(node)
        node = inner.producer
    if node is None or not is_op(node, "MatMul"):
        return None
    found.nodes.append(node)
    found.q = _unscaled(context, node.inputs[0], found)
    found.k_transpose = _unscaled(context, node.inputs[1], found)
    transpose = _transposed_by(found.k_transpose, (0, 1, 3, 2), (0, 2, 1))
    if transpose is not None:
        found.k, found.k_nodes = transpose.inputs[0], [transpose]
    return found


def _unbounded(context: Context, node: Node | None, found: _Scores) -> Node | None:
    """Return the node of the scores before ``c * tanh(scores / c)``; the same without a bound."""
    tanh = None if node is None or not is_op(node, "Mul") else _operand_from(node, ("Tanh",))
    if node is None or tanh is None or tanh.producer is None:
        return node
    divided = produced_by(tanh.producer.inputs[0], "Div")
    bound = context.scalar(context.other_operand(node, tanh))
    if divided is None or not bound or context.scalar(divided.inputs[1]) != bound:
        return node
    found.softcap = bound
    found.nodes += [node, tanh.producer, divided]
    below = divided.inputs[0]
    return None if below is None else below.producer


def _transposed_by(value: Value | None, *perms: tuple[int, ...]) -> Node | None:
    """Return the Transpose with one of these orders of axes that computes a value."""
    node = produced_by(value, "Transpose")
    return node if node is not None and tuple(node.attrs.get("perm", ())) in perms else None


def _operand_from(node: Node, op_types: Iterable[str]) -> Value | None:
    for value in node.inputs:
        if produced_by(value, *op_types) is not None:
            return value
    return None


def _unscaled(context: Context, value: Value | None, found: _Scores) -> Value | None:
    """Return the operand of a multiplication by a constant, which joins the scale; else value."""
    node = produced_by(value, "Mul")
    if node is None:
        return value
    scaled = context.split_scale(node)
    if scaled is None:
        return value
    found.scale *= scaled[1]
    found.nodes.append(node)
    return scaled[0]


class _Split:
    """The nodes that split the last dimension of Q, K and V, [B, T, H * D], into heads.

    Attributes:
        heads: Number of heads.
        inputs: Q, K and V before the split.
        nodes: All these nodes, and those that join the heads of the result.
    """

    def __init__(self, heads: int) -> None:
        self.heads = heads
        self.inputs: list[Value] = []
        self.nodes: list[Node] = []

    def take(self, value: Value | None, perms: Sequence[tuple[int, ...]]) -> bool:
        """Add the Reshape and Transpose nodes that compute ``value`` from [B, T, H * D].

        Args:
            value: Q, K (transposed) or V, of rank 4.
            perms: Accepted orders of axes of the last Transpose.

        Returns:
            Whether there are such nodes.
        """
        transpose = _transposed_by(value, *perms)
        nodes = [transpose]
        # Exporters transpose K for the product either together with the split of its heads, by (0,
        # 2, 3, 1), or by a second node, which is this one.
        if transpose is not None and tuple(transpose.attrs["perm"]) == (0, 1, 3, 2):
            transpose = _transposed_by(transpose.inputs[0], (0, 2, 1, 3))
            nodes.append(transpose)
        if transpose is None:
            return False
        shape = produced_by(transpose.inputs[0], "Reshape")
        parts = shape_of(transpose.inputs[0])
        source = None if shape is None else shape.inputs[0]
        whole = shape_of(source)
        if shape is None or source is None or parts is None or whole is None:
            return False
        if len(whole) != 3 or len(parts) != 4 or parts[2] != self.heads:
            return False
        size, width = parts[3], whole[2]
        # The Reshape must only split the last dimension; another one would mix positions and heads.
        if not isinstance(size, int) or width != self.heads * size or parts[:2] != whole[:2]:
            return False
        self.inputs.append(source)
        self.nodes += [*(each for each in nodes if each is not None), shape]
        return True


def _split_heads(
    context: Context, q: Value | None, k: Value | None, v: Value | None, weighted: Node
) -> _Split | None:
    """Return the nodes that split and join the heads of attention; None if there are none.

    Args:
        context: The graph.
        q: Q, [B, H, T, D].
        k: K transposed, [B, H, D, S].
        v: V, [B, H, S, D].
        weighted: The product of the softmax and V.
    """
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
    transpose = context.sole_user(weighted.outputs[0], "Transpose")
    if transpose is None or _transposed_by(transpose.outputs[0], *merge) is None:
        return None
    joined = context.sole_user(transpose.outputs[0], "Reshape")
    if joined is None:
        return None
    whole, parts = shape_of(joined.outputs[0]), shape_of(transpose.outputs[0])
    if whole is None or parts is None or len(whole) != 3 or whole[:2] != parts[:2]:
        return None
    split.nodes += [transpose, joined]
    return split

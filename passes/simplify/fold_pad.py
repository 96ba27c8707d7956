"""The pass "FoldPad": zeros that a Pad puts around an image become the convolution's own pads.

Exporters of TensorFlow models write strided convolutions as Pad and Conv.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.parameters import Parameter
from subgraph.passes._patterns import Context, is_op, shape_of
from subgraph.transform.pass_manager import register_pass


@register_pass("FoldPad")
@attrs.frozen
class FoldPad:
    """Fold Pad into every Conv that uses it, if all its users are such.

    Attributes:
        guards: Filled with the parameters whose content the result depends on, and the version
            that was read.
    """

    guards: dict[Parameter, int] = attrs.field(factory=dict[Parameter, int])

    def __call__(self, graph: Graph) -> Graph:
        """Return a copy of ``graph`` with zero pads folded."""
        graph = graph.clone()
        context = Context(graph)
        replaced: dict[Value, Value] = {}
        for pad in graph.nodes:
            if not is_op(pad, "Pad") or pad.outputs[0] in context.outputs:
                continue
            context.begin()
            added = _spatial_pads(context, pad)
            users = list(dict.fromkeys(pad.outputs[0].uses))
            if added is None or not all(_takes(conv, pad.outputs[0], added) for conv in users):
                continue
            self.guards.update((parameter, parameter.version) for parameter in context.reads)
            for conv in users:
                replaced[conv.outputs[0]] = _padded(conv, pad, added)
        graph.rewire(replaced)
        return graph


def _spatial_pads(context: Context, node: Node) -> list[int] | None:
    """Return the pads of the spatial axes, begins before ends; None if there is more to it."""
    mode = node.attrs.get("mode", "constant")
    if (mode.decode() if isinstance(mode, bytes) else mode) != "constant" or not node.inputs:
        return None
    inputs = [*node.inputs, None, None, None][:4]
    if node.version < 11:
        pads = node.attrs.get("pads", node.attrs.get("paddings"))
        number: float | None = float(node.attrs.get("value", 0.0))
    else:
        array = context.numbers(inputs[1])
        pads = None if array is None else array.tolist()
        number = 0.0 if inputs[2] is None else context.scalar(inputs[2])
    shape = shape_of(inputs[0])
    if pads is None or shape is None or number != 0.0:
        return None
    rank, axes = len(shape), list(range(len(shape)))
    if inputs[3] is not None:
        array = context.numbers(inputs[3])
        if array is None:
            return None
        axes = [axis % rank for axis in array.tolist()]
    if len(pads) != 2 * len(axes) or min(pads, default=0) < 0:
        return None
    full = [0] * (2 * rank)
    for k, axis in enumerate(axes):
        full[axis], full[rank + axis] = pads[k], pads[len(axes) + k]
    begins, ends = full[:rank], full[rank:]
    return None if any(begins[:2] + ends[:2]) else begins[2:] + ends[2:]


def _takes(conv: Node, value: Value, added: Sequence[int]) -> bool:
    """Return whether a user is a convolution of that value that can pad it."""
    if not is_op(conv, "Conv") or conv.inputs[0] is not value or conv.inputs.count(value) != 1:
        return False
    return _automatic(conv) in ("NOTSET", "VALID") and len(_own(conv, len(added))) == len(added)


def _automatic(conv: Node) -> str:
    text = conv.attrs.get("auto_pad", "NOTSET")
    return text.decode() if isinstance(text, bytes) else str(text)


def _own(conv: Node, count: int) -> list[int]:
    """Return the pads that a convolution has itself."""
    none = [0] * count
    return none if _automatic(conv) == "VALID" else list(conv.attrs.get("pads", none))


def _padded(conv: Node, pad: Node, added: Sequence[int]) -> Value:
    pads = [a + b for a, b in zip(_own(conv, len(added)), added, strict=True)]
    attributes = {name: value for name, value in conv.attrs.items() if name != "auto_pad"}
    made = Node(
        "Conv",
        [pad.inputs[0], *conv.inputs[1:]],
        name=conv.name,
        version=conv.version,
        attrs={**attributes, "pads": tuple(pads)},
        metadata={**(conv.metadata or {}), "origin": f"{pad.name}\n{conv.name}"},
    )
    conv.name = f"{conv.name}.unpadded"
    made.outputs[0].type = conv.outputs[0].type
    return made.outputs[0]

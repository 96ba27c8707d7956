"""Small random models with the whole generation loop inside, as ONNX Runtime's tools write them.

The decoders have inputs and outputs of the names, dtypes and shapes that ONNX Runtime demands.
Weights are random, so that the most probable token is far from the second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from subgraph.graph.types import Array

INT32, FLOAT = TensorProto.INT32, TensorProto.FLOAT
_LARGEST = int(np.iinfo(np.int64).max)


class Writer:
    """Writes the nodes and weights of a graph.

    Attributes:
        heads: Heads of attention.
        size: Elements of a head.
        width: Elements of a token.
        vocabulary: Number of tokens.
    """

    def __init__(self, heads: int, size: int, vocabulary: int, seed: int) -> None:
        """Begin without nodes."""
        self.heads, self.size, self.width, self.vocabulary = heads, size, heads * size, vocabulary
        self._rng = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        self._prefix = f"g{seed}"

    def op(
        self, op_type: str, *inputs: str, out: str = "", outputs: int = 1, **attributes: Any
    ) -> Any:
        """Add a node; return the name of its output, or a list of names."""
        own = op_type == "Attention"
        names = [out or f"{self._prefix}.v{len(self._nodes)}.{k}" for k in range(outputs)]
        domain = "com.microsoft" if own else ""
        self._nodes.append(helper.make_node(op_type, inputs, names, domain=domain, **attributes))
        return names[0] if outputs == 1 else names

    def constant(self, array: Any, dtype: str = "int64") -> str:
        """Add a weight and return its name."""
        name = f"{self._prefix}.w{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(np.asarray(array, dtype), name))
        return name

    def weight(self, *shape: int, scale: float = 1.0) -> str:
        """Add a random weight, normal with a deviation of ``scale``, and return its name."""
        return self.constant(scale * self._rng.standard_normal(shape), "float32")

    def product(self, x: str, columns: int, depth: int = 0) -> str:
        """Multiply by a random matrix."""
        depth = depth or self.width
        return self.op("MatMul", x, self.weight(depth, columns, scale=depth**-0.5))

    def normalized(self, x: str) -> str:
        """Normalize the last axis."""
        gain, bias = (self.constant(np.full(self.width, v), "float32") for v in (1, 0))
        return self.op("LayerNormalization", x, gain, bias, axis=-1)

    def by_heads(self, x: str) -> str:
        """Reshape [batch, tokens, width] to [batch, heads, tokens, size]."""
        split = self.op("Reshape", x, self.constant([0, 0, self.heads, self.size]))
        return self.op("Transpose", split, perm=[0, 2, 1, 3])

    def attention(self, query: str, key: str, value: str, bias: str = "") -> str:
        """Attend; operands are [batch, heads, tokens, size]."""
        swapped = self.op("Transpose", key, perm=[0, 1, 3, 2])
        scores = self.op("MatMul", query, swapped)
        scores = self.op("Mul", scores, self.constant(self.size**-0.5, "float32"))
        if bias:
            scores = self.op("Add", scores, bias)
        context = self.op("MatMul", self.op("Softmax", scores, axis=-1), value)
        joined = self.op("Transpose", context, perm=[0, 2, 1, 3])
        return self.op("Reshape", joined, self.constant([0, 0, self.width]))

    def network(self, x: str) -> str:
        """Add the two-layer network of a layer."""
        inner = self.op("Relu", self.product(self.normalized(x), 2 * self.width))
        return self.op("Add", x, self.product(inner, self.width, 2 * self.width))

    def logits(self, x: str) -> str:
        """Add the output layer."""
        table = self.weight(self.width, self.vocabulary, scale=2 * self.width**-0.5)
        return self.op("MatMul", self.normalized(x), table, out="logits")

    def graph(
        self, name: str, inputs: Sequence[tuple[Any, ...]], outputs: Sequence[tuple[Any, ...]]
    ) -> onnx.GraphProto:
        """Return the graph; inputs and outputs are (name, dtype, shape)."""
        given, made = (
            [helper.make_tensor_value_info(*each) for each in ports] for ports in (inputs, outputs)
        )
        return helper.make_graph(self._nodes, name, given, made, self._weights)


def gpt(
    layers: int = 2,
    heads: int = 2,
    size: int = 8,
    vocabulary: int = 23,
    *,
    positions: int = 64,
    seed: int = 0,
    last_only: bool = False,
) -> onnx.GraphProto:
    """Return a decoder like GPT-2; ``last_only``: with logits of the last token alone."""
    w = Writer(heads, size, vocabulary, seed)
    x = w.op(
        "Add",
        w.op("Gather", w.weight(vocabulary, w.width), "input_ids"),
        w.op("Gather", w.weight(positions, w.width, scale=0.5), "position_ids"),
    )
    for k in range(layers):
        joined = [w.weight(w.width, 3 * w.width, scale=w.width**-0.5), w.weight(3 * w.width)]
        # Attention has two outputs, of which the second is the graph's.
        out, present = w.op(
            "Attention",
            w.normalized(x),
            *joined,
            "attention_mask",
            f"past_{k}",
            outputs=2,
            num_heads=heads,
            unidirectional=1,
        )
        w.op("Identity", present, out=f"present_{k}")
        x = w.network(w.op("Add", x, w.product(out, w.width)))
    if last_only:
        x = w.op("Slice", x, *(w.constant([n]) for n in (-1, _LARGEST, 1)))
    w.logits(x)
    tokens = ["B", "S"]
    cache = [2, "B", heads, "P", size]
    inputs = [("input_ids", INT32, tokens), ("position_ids", INT32, tokens)]
    inputs.append(("attention_mask", INT32, ["B", "T"]))
    inputs += [(f"past_{k}", FLOAT, cache) for k in range(layers)]
    outputs = [("logits", FLOAT, ["B", 1 if last_only else "S", vocabulary])]
    outputs += [(f"present_{k}", FLOAT, [2, "B", heads, "T", size]) for k in range(layers)]
    return w.graph("gpt", inputs, outputs)


class _Decoder:
    """Writes decoder layers with cross attention into a `Writer`; shared by encoder and decoder."""

    def __init__(self, layers: int, seed: int) -> None:
        self.layers, self._seed = layers, seed

    def write(self, w: Writer, ids: str, mask: str, pasts: Mapping[str, str], hidden: str) -> None:
        """Write all layers.

        Args:
            w: The writer.
            ids: Name of the tokens, [batch, tokens].
            mask: Name of the bias of cross attention; "" for none.
            pasts: Names of cached keys and values of own and cross attention, by name as in
                "past_key_self_0"; cross ones are computed from ``hidden`` if missing.
            hidden: Name of the encoder's result; "" in a decoder.
        """
        w._rng = np.random.default_rng(self._seed)  # the same weights in both graphs
        x = w.op("Gather", w.weight(w.vocabulary, w.width), ids)
        for k in range(self.layers):
            normal = w.normalized(x)
            query, key, value = (w.by_heads(w.product(normal, w.width)) for _ in range(3))
            if f"past_key_self_{k}" in pasts:
                key, value = (
                    w.op("Concat", pasts[f"past_{part}_self_{k}"], new, axis=2)
                    for part, new in (("key", key), ("value", value))
                )
            w.op("Identity", key, out=f"present_key_self_{k}")
            w.op("Identity", value, out=f"present_value_self_{k}")
            # Several tokens at once are all from the begin on, without a cache.
            causal = self._causal(w, ids) if not pasts else ""
            x = w.op("Add", x, w.product(w.attention(query, key, value, causal), w.width))
            query = w.by_heads(w.product(w.normalized(x), w.width))
            tables = [w.weight(w.width, w.width, scale=w.width**-0.5) for _ in range(2)]
            if hidden:
                key, value = self._cross(w, k, hidden, tables)
            else:
                key, value = (pasts[f"past_{part}_cross_{k}"] for part in ("key", "value"))
            x = w.op("Add", x, w.product(w.attention(query, key, value, mask), w.width))
            x = w.network(x)
        w.logits(x)

    def write_cross(self, w: Writer, hidden: str) -> None:
        """Write the keys and values of cross attention alone."""
        for k in range(self.layers):
            tables = [w.weight(w.width, w.width, scale=w.width**-0.5) for _ in range(2)]
            self._cross(w, k, hidden, tables)

    def _cross(self, w: Writer, k: int, hidden: str, tables: Sequence[str]) -> list[str]:
        made = [w.by_heads(w.op("MatMul", hidden, table)) for table in tables]
        for part, value in zip(("key", "value"), made, strict=True):
            w.op("Identity", value, out=f"present_{part}_cross_{k}")
        return made

    def _causal(self, w: Writer, ids: str) -> str:
        length = w.op("Squeeze", w.op("Shape", ids, start=1, end=2))
        steps = [w.constant(v) for v in (0, 1)]
        row = w.op("Range", steps[0], length, steps[1])
        later = w.op("Less", w.op("Unsqueeze", row, w.constant([1])), row)
        return w.op("Mul", w.op("Cast", later, to=FLOAT), w.constant(-1e9, "float32"))


def _mask_bias(w: Writer) -> str:
    mask = w.op("Cast", "encoder_attention_mask", to=FLOAT)
    wide = w.op("Unsqueeze", mask, w.constant([1, 2]))
    one, scale = w.constant(1, "float32"), w.constant(1e9, "float32")
    return w.op("Mul", w.op("Sub", wide, one), scale)


def encoder_decoder(
    layers: int = 2,
    heads: int = 2,
    size: int = 8,
    vocabulary: int = 23,
    *,
    seed: int = 0,
    whisper: bool = False,
    hidden: bool = True,
    first_step: bool = True,
    features: int = 5,
) -> tuple[onnx.GraphProto, onnx.GraphProto]:
    """Return the encoder, with the first step of the decoder, and the decoder.

    Args:
        layers: Layers of each.
        heads: Heads of attention.
        size: Elements of a head.
        vocabulary: Number of tokens.
        seed: Of the weights.
        whisper: The form of Whisper's, whose encoder takes ``features`` numbers of each position.
        hidden: Whether the decoder has the input encoder_hidden_states.
        first_step: Whether the encoder's graph runs the decoder's first step, too.
        features: See ``whisper``.
    """
    shared = _Decoder(layers, seed + 1)
    w = Writer(heads, size, vocabulary, seed)
    if whisper:
        frames = w.op("Transpose", "encoder_input_ids", perm=[0, 2, 1])
        x, bias = w.product(frames, w.width, features), ""
    else:
        x = w.op("Gather", w.weight(vocabulary, w.width), "encoder_input_ids")
        bias = _mask_bias(w)
    normal = w.normalized(x)
    query, key, value = (w.by_heads(w.product(normal, w.width)) for _ in range(3))
    attended = w.attention(query, key, value, bias)
    x = w.network(w.op("Add", x, w.product(attended, w.width)))
    x = w.op("Identity", x, out="encoder_hidden_states")
    if first_step:
        shared.write(w, "decoder_input_ids", bias, {}, x)
    else:
        shared.write_cross(w, x)
    own, cross = ["B", heads, "D", size], ["B", heads, "E", size]
    tokens = ("decoder_input_ids", INT32, ["B", "D"])
    masked = [("encoder_attention_mask", INT32, ["B", "E"])]
    if whisper:
        inputs = [("encoder_input_ids", FLOAT, ["B", features, "E"]), tokens]
    else:
        inputs = [("encoder_input_ids", INT32, ["B", "E"]), *masked, tokens]
    kept = [f"{part}_self_{k}" for k in range(layers) for part in ("key", "value")]
    fixed = [f"{part}_cross_{k}" for k in range(layers) for part in ("key", "value")]
    state = ("encoder_hidden_states", FLOAT, ["B", "E", w.width])
    outputs: list[tuple[Any, ...]] = [("logits", FLOAT, ["B", "D", vocabulary]), state]
    outputs += [(f"present_{name}", FLOAT, own) for name in kept]
    outputs += [(f"present_{name}", FLOAT, cross) for name in fixed]
    if not first_step:
        inputs, outputs = inputs[:-1], outputs[2 + len(kept) :]
    encoder = w.graph("encoder", inputs, outputs)

    w = Writer(heads, size, vocabulary, seed + 2)
    names = {f"past_{name}": f"past_{name}" for name in (*kept, *fixed)}
    shared.write(w, "input_ids", "" if whisper else _mask_bias(w), names, "")
    inputs = [("input_ids", INT32, ["B", 1]), *([] if whisper else masked)]
    inputs += [state] if hidden else []
    inputs += [(f"past_{name}", FLOAT, own) for name in kept]
    inputs += [(f"past_{name}", FLOAT, cross) for name in fixed]
    grown = ["B", heads, "T", size]
    outputs = [("logits", FLOAT, ["B", 1, vocabulary])]
    outputs += [(f"present_{name}", FLOAT, grown) for name in kept]
    return encoder, w.graph("decoder", inputs, outputs)


def generation_model(
    op_type: str,
    operands: Mapping[str, Array],
    outputs: Sequence[tuple[str, int]],
    formals: Sequence[str],
    **attributes: Any,
) -> onnx.ModelProto:
    """Return a model of one node.

    Args:
        op_type: The operator.
        operands: Its inputs by name; their sizes are symbolic.
        outputs: Names and dtypes of its outputs; the name "" leaves one out.
        formals: Names of the operator's inputs, in order.
        **attributes: Its attributes.
    """
    names = [name if name in operands else "" for name in formals]
    while not names[-1]:
        names.pop()
    node = helper.make_node(
        op_type, names, [n for n, _ in outputs], "search", domain="com.microsoft", **attributes
    )
    inputs = [
        helper.make_tensor_value_info(
            name,
            helper.np_dtype_to_tensor_dtype(array.dtype),
            [f"{name}.{k}" for k in range(array.ndim)] if array.ndim > 1 else array.shape,
        )
        for name, array in operands.items()
    ]
    made = [helper.make_tensor_value_info(n, dtype, None) for n, dtype in outputs if n]
    graph = helper.make_graph([node], "generation", inputs, made)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def expected_of(model: onnx.ModelProto, operands: Mapping[str, Array]) -> list[Any]:
    """Return ONNX Runtime's results."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    content = model.SerializeToString()
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return session.run(None, dict(operands))

"""FlexAttention (ai.onnx.preview): attention with bodies that change scores and probabilities.

Like the control-flow operators, it runs the executors of the node's bodies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph.graph import Node
from subgraph.graph.types import DTYPE_OF_ONNX, Array, numpy_dtype
from subgraph.operators.bodies import captures_of, check_input_values

Run = Callable[[Sequence[Any]], Sequence[Any]]


def flex_attention(node: Node, bodies: Sequence[Run]) -> Run:
    """Return a callable that runs the node on its inputs and captures.

    Args:
        node: The FlexAttention node.
        bodies: Callables that run each body on its inputs and captures, in attribute order.
    """
    captures = captures_of(node, len(node.inputs)).items()
    spans = {name: (run, span) for (name, span), run in zip(captures, bodies, strict=True)}

    def changed(name: str, values: Array, inputs: Sequence[Any]) -> Array:
        if name not in spans:
            return values
        run, span = spans[name]
        result: Array = run([values, *inputs[span]])[0]
        if result.shape != values.shape:
            raise ShapeError(
                f"node {node.name!r} (FlexAttention): {name} gives shape {result.shape} for "
                f"{values.shape}; it must keep the shape"
            )
        return result.astype(values.dtype, copy=False)

    def compute(inputs: Sequence[Any]) -> Sequence[Any]:
        query, key, value = inputs[:3]
        check_input_values(node, (query, key, value))
        # Grouped-query attention: several heads of queries share a head of keys and values.
        groups = query.shape[1] // key.shape[1]
        precision = _precision(node, query)
        # Queries and keys are multiplied with the scale's root in the input's precision, as in
        # onnx.reference.
        scale = node.attrs.get("scale")
        scale = 1.0 / np.sqrt(max(query.shape[3], 1)) if scale is None else scale
        root = query.dtype.type(np.sqrt(np.float32(scale)))
        keys = np.repeat(key, groups, axis=1) * root
        scores = np.matmul(query * root, keys.swapaxes(-1, -2)).astype(precision)
        scores = changed("score_mod", scores, inputs)
        # Subtracting the maximum keeps exp from overflowing and cancels in the quotient.
        powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
        probabilities = powers / powers.sum(axis=-1, keepdims=True)
        probabilities = changed("prob_mod", probabilities, inputs)
        values = np.repeat(value, groups, axis=1).astype(precision)
        return [np.matmul(probabilities, values).astype(value.dtype)]

    return compute


def _precision(node: Node, query: Array) -> np.dtype[Any]:
    number = node.attrs.get("softmax_precision")
    if number is not None:
        return numpy_dtype(DTYPE_OF_ONNX[int(number)])
    return query.dtype if query.dtype.itemsize >= 4 else np.dtype(np.float32)

"""Operators of PyTorch that its exporter does not know, made of operators with a form in ONNX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def decompositions(torch: Any) -> dict[Any, Callable[..., Any]]:
    """Return the table of decompositions, for ``ExportedProgram.run_decompositions``."""
    aten = torch.ops.aten
    return {
        aten._transformer_encoder_layer_fwd.default: _encoder_layer(torch),
        aten.sort.stable: _stable_sort(torch),
    }


def _stable_sort(torch: Any) -> Callable[..., Any]:
    """Return the sort that leaves equal elements in their order, as ONNX's TopK does."""

    def sort(x: Any, *, stable: bool | None, dim: int = -1, descending: bool = False) -> Any:
        return torch.ops.aten.sort.default(x, dim, descending)

    return sort


def _encoder_layer(torch: Any) -> Callable[..., Any]:
    """Return the layer of ``torch.nn.TransformerEncoderLayer``.

    While gradients are off, PyTorch traces such a layer as one operator.
    """
    linear, layer_norm = torch.nn.functional.linear, torch.nn.functional.layer_norm

    def layer(
        x: Any,
        width: int,
        heads: int,
        *arguments: Any,
        mask: Any = None,
        mask_type: int | None = None,
    ) -> Any:
        """Compute ``aten::_transformer_encoder_layer_fwd``, whose schema names the arguments."""
        in_weight, in_bias, out_weight, out_bias, gelu, norm_first, epsilon = arguments[:7]
        norms, feeds = arguments[7:11], arguments[11:15]
        if len(arguments) > 15:
            mask, mask_type = arguments[15:]

        def attend(x: Any) -> Any:
            split = linear(x, in_weight, in_bias).unflatten(-1, (3, heads, width // heads))
            query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
            scores = query @ key.transpose(-2, -1) * (width // heads) ** -0.5
            if mask is not None:  # 0: [query, key]; 1: [batch, key]; 2: [batch, head, query, key]
                hidden = mask.bool()  # it may have -inf where a key is hidden
                hidden = hidden[:, None, None] if mask_type == 1 else hidden
                scores = scores.masked_fill(hidden, float("-inf"))
            return linear(
                (scores.softmax(-1) @ value).transpose(1, 2).flatten(2), out_weight, out_bias
            )

        def feed(x: Any) -> Any:
            inner = linear(x, *feeds[:2])
            inner = torch.nn.functional.gelu(inner) if gelu else inner.relu()
            return linear(inner, *feeds[2:])

        def norm(x: Any, weight: Any, bias: Any) -> Any:
            return layer_norm(x, (width,), weight, bias, epsilon)

        if norm_first:
            x = x + attend(norm(x, *norms[:2]))
            return x + feed(norm(x, *norms[2:]))
        x = norm(x + attend(x), *norms[:2])
        return norm(x + feed(x), *norms[2:])

    return layer

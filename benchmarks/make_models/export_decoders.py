"""Export decoders of Hugging Face's transformers whose cache is an input and an output.

Writes NAME.onnx by the dynamo exporter for Llama, Qwen2, Qwen3, Gemma and Gemma 2 of moderate
widths, with random weights: 16 heads of queries share 4 heads of keys, in Gemma 1. Inputs are
``input_ids``, ``attention_mask``, ``position_ids`` and ``past.LAYER.key`` and ``.value``, outputs
``logits`` and ``present.*``; the number of tokens and of cached positions may vary. For
``benchmarks/decoder.py``. Needs torch, transformers and onnxscript.
"""

# PyTorch and the libraries over it are not in the environment of `make lint`.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from export_models import FORMS, export_all
from torch import nn
from torch.export import Dim
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

VOCABULARY, HEAD, LAYERS = 8000, 64, 4
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}
KEYS = {"llama": 4, "qwen2": 4, "qwen3": 4, "gemma": 1, "gemma2": 4}


class Step(nn.Module):
    """A decoder as a function of tokens and cached keys and values."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        past: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        cache = DynamicCache()
        for layer in range(len(past) // 2):
            cache.update(past[2 * layer], past[2 * layer + 1], layer)
        made = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        )
        present = [
            part for each in made.past_key_values.layers for part in (each.keys, each.values)
        ]
        return (made.logits, *present)


def export(name: str, folder: Path) -> None:
    """Write the decoder of a type to a folder."""
    config: Any = AutoConfig.for_model(
        name,
        **SIZES,
        num_key_value_heads=KEYS[name],
        num_hidden_layers=LAYERS,
        head_dim=HEAD,
        vocab_size=VOCABULARY,
        max_position_embeddings=8192,
    )
    model = Step(AutoModelForCausalLM.from_config(config)).eval()
    names = [f"past.{layer}.{part}" for layer in range(LAYERS) for part in ("key", "value")]
    count, cached = 3, 5
    inputs = {
        "input_ids": torch.randint(0, VOCABULARY, (1, count)),
        "attention_mask": torch.ones(1, cached + count, dtype=torch.int64),
        "position_ids": torch.arange(cached, cached + count)[None],
        "past": [torch.randn(1, KEYS[name], cached, HEAD) for _ in names],
    }
    varying = {key: {1: Dim.DYNAMIC} for key in [*inputs][:3]}
    torch.onnx.export(
        model,
        (),
        str(folder / f"{name}.onnx"),
        kwargs=inputs,
        dynamic_shapes={**varying, "past": [{2: Dim.DYNAMIC} for _ in names]},
        input_names=[*varying, *names],
        output_names=["logits", *(each.replace("past", "present") for each in names)],
        **FORMS[""],
    )


if __name__ == "__main__":
    export_all(__doc__, KEYS, export)

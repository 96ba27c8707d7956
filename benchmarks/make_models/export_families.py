"""Export one model of each common family of networks, with PyTorch.

Mobile and dense convolutional networks, vision and language transformers, a decoder with a KV
cache, recurrent networks, a U-Net, a diffusion block, speech with STFT, a detector's heads. Writes
NAME.onnx (dynamo exporter), NAME_ts17.onnx (TorchScript exporter, where it can) and NAME.npz with
inputs. Weights are seeded and random. Needs torch, torchvision, transformers and onnxscript.
"""

# PyTorch and the libraries over it are not in the environment of `make lint`.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from export_models import FORMS, Inputs, export_all, save_inputs, with_statistics
from torch import nn
from torch.nn import functional

Made = tuple[nn.Module, Inputs]
VOCABULARY = 8000


def image(size: int = 224) -> Inputs:
    """Return one random image."""
    return (torch.randn(1, 3, size, size),)


def text(length: int = 64, vocabulary: int = VOCABULARY) -> Inputs:
    """Return one row of token ids."""
    return (torch.randint(0, vocabulary, (1, length)),)


def vision(name: str, size: int = 224, **options: object) -> Made:
    """Return a torchvision classifier."""
    import torchvision

    return with_statistics(getattr(torchvision.models, name)(**options)), image(size)


def segmentation() -> Made:
    """Return LR-ASPP on MobileNetV3."""
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    model = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None)
    return with_statistics(model), image()


class Output(nn.Module):
    """One result of a transformers model, by name."""

    def __init__(self, model: nn.Module, result: str, **options: object) -> None:
        super().__init__()
        self.model, self.result, self.options = model, result, options

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return getattr(self.model(input_ids=ids, **self.options), self.result)


def language(config: str, model: str, result: str, **sizes: object) -> Made:
    """Return a transformers model."""
    import transformers

    made = getattr(transformers, model)(getattr(transformers, config)(**sizes)).eval()
    options = {"use_cache": False} if result == "logits" else {}
    return Output(made, result, **options).eval(), text()


class CachedBlock(nn.Module):
    """A decoder block with the cached keys and values of the previous tokens as inputs."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Inputs:
        batch, tokens, width = x.shape
        shape = (batch, tokens, self.heads, width // self.heads)
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        query, key, value = (part.reshape(shape).transpose(1, 2) for part in parts)
        keys, values = torch.cat([keys, key], 2), torch.cat([values, value], 2)
        scores = query @ keys.transpose(-1, -2) / shape[-1] ** 0.5
        mixed = (torch.softmax(scores, -1) @ values).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.out(mixed)
        return x + self.mlp(self.norms[1](x)), keys, values


class CachedDecoder(nn.Module):
    """One step of a small GPT over a KV cache."""

    def __init__(self, layers: int = 4, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(512, width)
        self.blocks = nn.ModuleList([CachedBlock(width, heads) for _ in range(layers)])
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor, place: torch.Tensor, *past: torch.Tensor) -> Inputs:
        x = self.tokens(ids) + self.places(place)
        present: list[torch.Tensor] = []
        for k, block in enumerate(self.blocks):
            x, keys, values = block(x, past[2 * k], past[2 * k + 1])
            present += [keys, values]
        return (self.head(x), *present)


def gpt_kv() -> Made:
    """Return the decoder with 32 tokens in its cache."""
    past = [torch.randn(1, 4, 32, 64) for _ in range(8)]
    return CachedDecoder().eval(), (*text(1), torch.full((1, 1), 32), *past)


class Recurrent(nn.Module):
    """Two bidirectional recurrent layers over an embedding."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1000, 128)
        self.layers = kind(128, 128, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(256, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.tokens(ids))[0])


def recurrent(kind: type[nn.LSTM | nn.GRU]) -> Made:
    """Return a recurrent classifier and two sequences."""
    return Recurrent(kind).eval(), (torch.randint(0, 1000, (2, 40)),)


def double_conv(inputs: int, outputs: int) -> nn.Module:
    """Return two 3 x 3 convolutions with batch normalisation."""
    layers: list[nn.Module] = []
    for width in (inputs, outputs):
        conv = nn.Conv2d(width, outputs, 3, padding=1)
        layers += [conv, nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Two levels down, two up by transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([double_conv(3, 32), double_conv(32, 64), double_conv(64, 128)])
        self.grow = nn.ModuleList(
            [nn.ConvTranspose2d(128, 64, 2, 2), nn.ConvTranspose2d(64, 32, 2, 2)]
        )
        self.up = nn.ModuleList([double_conv(128, 64), double_conv(64, 32)])
        self.head = nn.Conv2d(32, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down[0](x)
        second = self.down[1](functional.max_pool2d(first, 2))
        x = self.down[2](functional.max_pool2d(second, 2))
        for grow, up, skip in zip(self.grow, self.up, (second, first), strict=True):
            x = up(torch.cat([grow(x), skip], 1))
        return self.head(x)


class Residual(nn.Module):
    """A diffusion network's block: group norms, SiLU, the time added between convolutions."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)])
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        hidden = self.first(functional.silu(self.norms[0](x)))
        hidden = hidden + self.time(functional.silu(time))[:, :, None, None]
        return self.skip(x) + self.second(functional.silu(self.norms[1](hidden)))


class Diffusion(nn.Module):
    """A small denoiser: time embedding, residual blocks, attention over pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 128))
        self.stem, self.down = nn.Conv2d(4, 64, 3, padding=1), nn.Conv2d(64, 128, 3, 2, 1)
        sizes = ((64, 64), (128, 128), (128, 128), (192, 64))
        self.blocks = nn.ModuleList([Residual(i, o, 128) for i, o in sizes])
        self.norm = nn.GroupNorm(8, 128)
        self.attention = nn.MultiheadAttention(128, 4, batch_first=True)
        self.head = nn.Conv2d(64, 4, 3, padding=1)

    def forward(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        waves = torch.exp(-torch.arange(32) * 0.3)[None] * step[:, None]
        time = self.time(torch.cat([waves.sin(), waves.cos()], 1))
        skip = self.blocks[0](self.stem(x), time)
        x = self.blocks[1](self.down(skip), time)
        pixels = self.norm(x).flatten(2).transpose(1, 2)
        mixed = self.attention(pixels, pixels, pixels, need_weights=False)[0]
        x = self.blocks[2](x + mixed.transpose(1, 2).reshape(x.shape), time)
        x = functional.interpolate(x, scale_factor=2.0, mode="nearest")
        return self.head(self.blocks[3](torch.cat([x, skip], 1), time))


class Speech(nn.Module):
    """Log-mel features by STFT, 1-D convolutions, a transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            *(nn.Conv1d(80, 256, 3, padding=1), nn.GELU()),
            *(nn.Conv1d(256, 256, 3, stride=2, padding=1), nn.GELU()),
        )
        self.layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, activation="gelu")
        self.register_buffer("window", torch.hann_window(400))
        self.register_buffer("mel", torch.rand(201, 80))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        waves = torch.stft(x, 400, 160, window=self.window, center=False, return_complex=True)
        power = torch.view_as_real(waves).pow(2).sum(-1)
        features = torch.log(torch.clamp(power.transpose(1, 2) @ self.mel, min=1e-10))
        return self.layer(self.convs(features.transpose(1, 2)).transpose(1, 2))


class Detector(nn.Module):
    """A backbone with SiLU, classes and boxes for each cell, the best 50 of them."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.SiLU()]
        layers += [nn.Conv2d(32, 64, 3, 2, 1), nn.SiLU(), nn.Conv2d(64, 64, 3, 2, 1), nn.SiLU()]
        self.backbone = nn.Sequential(*layers)
        self.classes, self.boxes = nn.Conv2d(64, 20, 1), nn.Conv2d(64, 4, 1)

    def forward(self, x: torch.Tensor) -> Inputs:
        cells = self.backbone(x)
        classes = self.classes(cells).flatten(2).transpose(1, 2).sigmoid()
        boxes = self.boxes(cells).flatten(2).transpose(1, 2).sigmoid()
        scores, best = classes.amax(-1).topk(50, 1)
        chosen = torch.gather(boxes, 1, best[..., None].expand(-1, -1, 4))
        return scores, chosen, classes.argmax(-1)


_PLAIN = (
    *("resnet18", "resnet34", "resnext50_32x4d", "regnet_y_400mf", "vgg11_bn", "mnasnet1_0"),
    *("efficientnet_b0", "mobilenet_v3_large", "shufflenet_v2_x1_0", "convnext_tiny"),
    *("vit_b_16", "swin_t"),
)
_EAGER = {"attn_implementation": "eager", "vocab_size": VOCABULARY}
MODELS: dict[str, Callable[[], Made]] = {
    **{name: partial(vision, name) for name in _PLAIN},
    "googlenet": partial(vision, "googlenet", aux_logits=False, init_weights=False),
    "inception_v3": partial(vision, "inception_v3", 299, aux_logits=False, init_weights=False),
    "lraspp": segmentation,
    "gpt2": partial(
        language, "GPT2Config", "GPT2LMHeadModel", "logits", n_layer=6, n_embd=384, n_head=6,
        **_EAGER,
    ),
    "llama": partial(
        language, "LlamaConfig", "LlamaForCausalLM", "logits", hidden_size=256,
        intermediate_size=688, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, **_EAGER,
    ),
    "t5": partial(
        language, "T5Config", "T5EncoderModel", "last_hidden_state", d_model=256, num_layers=4,
        num_heads=4, d_kv=64, d_ff=1024, vocab_size=VOCABULARY,
    ),
    "distilbert": partial(
        language, "DistilBertConfig", "DistilBertModel", "last_hidden_state", n_layers=3,
        vocab_size=VOCABULARY,
    ),
    "gpt_kv": gpt_kv,
    "lstm": partial(recurrent, nn.LSTM),
    "gru": partial(recurrent, nn.GRU),
    "unet": lambda: (with_statistics(UNet()), image(128)),
    "diffusion": lambda: (Diffusion().eval(), (torch.randn(1, 4, 32, 32), torch.tensor([3.0]))),
    "speech": lambda: (Speech().eval(), (torch.randn(1, 16000),)),
    "detector": lambda: (with_statistics(Detector()), image(256)),
}  # fmt: skip


def export(name: str, folder: Path) -> None:
    """Write the forms of one model, and its inputs."""
    model, inputs = MODELS[name]()
    names = [f"input{k}" for k in range(len(inputs))]
    save_inputs(folder / f"{name}.npz", names, inputs)
    for suffix in ("", "_ts17"):
        path = folder / f"{name}{suffix}.onnx"
        try:
            torch.onnx.export(
                model, inputs, path, input_names=names, verbose=False, **FORMS[suffix]
            )
        except (RuntimeError, ValueError) as error:
            if not suffix:
                raise
            print(f"{path}: the TorchScript exporter cannot: {str(error)[:80]}")
        else:
            print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    export_all(__doc__, MODELS, export)

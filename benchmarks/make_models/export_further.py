"""Export further networks that alternate between kinds of layers, with PyTorch.

Vision transformers over convolutions, volumes, image restoration, decoders of images, audio in one
dimension, detectors with split channels, graphs, recommendations, encoders and decoders of text.
Writes NAME.onnx (dynamo exporter) and NAME.npz with inputs. Weights are seeded and random. Needs
torch, torchvision, transformers and onnxscript.
"""

# PyTorch and the libraries over it are not in the environment of `make lint`.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from export_families import VOCABULARY, Made, image, language, text, vision
from export_models import FORMS, Inputs, export_all, save_inputs, with_statistics
from torch import nn
from torch.nn import functional


class First(nn.Module):
    """The first result of a model, called with one named argument."""

    def __init__(self, model: nn.Module, argument: str) -> None:
        super().__init__()
        self.model, self.argument = model, argument

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.model(**{self.argument: x})
        return found["out"] if isinstance(found, dict) and "out" in found else found[0]


def transformer(name: str, argument: str, inputs: Callable[[], Inputs], **sizes: object) -> Made:
    """Return a model of the library transformers by the name of its family."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**sizes)
    made = getattr(transformers, f"{name}Model")(config).eval()
    return First(made, argument).eval(), inputs()


def segmenter() -> Made:
    """Return DeepLab on MobileNetV3, whose dilated convolutions see the whole image."""
    from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large

    model = deeplabv3_mobilenet_v3_large(weights=None, weights_backbone=None)
    return First(with_statistics(model), "x").eval(), image()


def video() -> Made:
    """Return R3D-18 and eight frames."""
    from torchvision.models.video import r3d_18

    return with_statistics(r3d_18(weights=None)), (torch.randn(1, 3, 8, 64, 64),)


class Mixer(nn.Module):
    """MLP-Mixer: products over the patches and over the channels alternate."""

    def __init__(self, width: int = 384, patches: int = 196, depth: int = 8) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, width, 16, 16), nn.Linear(width, 1000)

        def mlp(inner: int, hidden: int) -> nn.Module:
            layers = nn.Linear(inner, hidden), nn.GELU(), nn.Linear(hidden, inner)
            return nn.Sequential(*layers)

        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2 * depth)])
        self.tokens = nn.ModuleList([mlp(patches, width // 2) for _ in range(depth)])
        self.channels = nn.ModuleList([mlp(width, 4 * width) for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        for k, (tokens, channels) in enumerate(zip(self.tokens, self.channels, strict=True)):
            x = x + tokens(self.norms[2 * k](x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(self.norms[2 * k + 1](x))
        return self.head(x.mean(1))


class UNet3D(nn.Module):
    """Two levels of volumes with instance normalization, as in medical segmentation."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        w = width
        self.levels = nn.ModuleList(
            [self.double(*pair) for pair in ((1, w), (w, 2 * w), (2 * w, 4 * w))]
        )
        self.up = nn.ModuleList(
            [nn.ConvTranspose3d(4 * w, 2 * w, 2, 2), nn.ConvTranspose3d(2 * w, w, 2, 2)]
        )
        self.joins = nn.ModuleList([self.double(4 * w, 2 * w), self.double(2 * w, w)])
        self.out = nn.Conv3d(w, 3, 1)

    def double(self, inputs: int, outputs: int) -> nn.Module:
        layers: list[nn.Module] = []
        for source in (inputs, outputs):
            norm = nn.InstanceNorm3d(outputs, affine=True)
            layers += [nn.Conv3d(source, outputs, 3, padding=1), norm, nn.LeakyReLU(0.01)]
        return nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.levels[0](x)
        second = self.levels[1](functional.max_pool3d(first, 2))
        x = self.levels[2](functional.max_pool3d(second, 2))
        x = self.joins[0](torch.cat([self.up[0](x), second], 1))
        return self.out(self.joins[1](torch.cat([self.up[1](x), first], 1)))


class Gate(nn.Module):
    """A block of NAFNet: two parts of the channels are multiplied, without an activation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        w = width
        self.norms = nn.ModuleList([nn.GroupNorm(1, w), nn.GroupNorm(1, w)])
        self.widen = nn.ModuleList([nn.Conv2d(w, 2 * w, 1), nn.Conv2d(w, 2 * w, 1)])
        self.depthwise = nn.Conv2d(2 * w, 2 * w, 3, padding=1, groups=2 * w)
        self.pooled = nn.Conv2d(w, w, 1)
        self.narrow = nn.ModuleList([nn.Conv2d(w, w, 1), nn.Conv2d(w, w, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.depthwise(self.widen[0](self.norms[0](x))).chunk(2, 1)
        y = a * b
        x = x + self.narrow[0](y * self.pooled(y.mean((2, 3), keepdim=True)))
        a, b = self.widen[1](self.norms[1](x)).chunk(2, 1)
        return x + self.narrow[1](a * b)


class NAFNet(nn.Module):
    """Image restoration over two resolutions."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        w = width
        self.first, self.last = nn.Conv2d(3, w, 3, padding=1), nn.Conv2d(w, 3, 3, padding=1)
        self.outer = nn.ModuleList([Gate(w), Gate(w)])
        self.down, self.inner = nn.Conv2d(w, 2 * w, 2, 2), nn.Sequential(*map(Gate, [2 * w] * 4))
        self.up = nn.Sequential(nn.Conv2d(2 * w, 4 * w, 1), nn.PixelShuffle(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.outer[0](self.first(x))
        return x + self.last(self.outer[1](y + self.up(self.inner(self.down(y)))))


class EDSR(nn.Module):
    """Super-resolution: residual branches are scaled by one number."""

    def __init__(self, width: int = 64, blocks: int = 8) -> None:
        super().__init__()

        def conv(inputs: int, outputs: int) -> nn.Module:
            return nn.Conv2d(inputs, outputs, 3, padding=1)

        self.head, w = conv(3, width), width
        self.blocks = nn.ModuleList(
            [nn.Sequential(conv(w, w), nn.ReLU(), conv(w, w)) for _ in range(blocks)]
        )
        self.tail = nn.Sequential(conv(w, 4 * w), nn.PixelShuffle(2), conv(w, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = y = self.head(x)
        for block in self.blocks:
            y = y + 0.1 * block(y)
        return self.tail(y + first)


def conv_silu(inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> nn.Module:
    """Return a convolution with batch normalization and SiLU."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.SiLU())


class SplitStage(nn.Module):
    """A stage of YOLOv8: half of the channels pass through bottlenecks, all are joined."""

    def __init__(self, inputs: int, outputs: int, blocks: int) -> None:
        super().__init__()
        half = outputs // 2
        self.first = conv_silu(inputs, outputs)
        pairs = (nn.Sequential(*(conv_silu(half, half, 3) for _ in "ab")) for _ in range(blocks))
        self.blocks = nn.ModuleList(pairs)
        self.last = conv_silu((2 + blocks) * half, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = list(self.first(x).chunk(2, 1))
        for block in self.blocks:
            parts.append(parts[-1] + block(parts[-1]))
        return self.last(torch.cat(parts, 1))


class Pyramid(nn.Module):
    """A detector's backbone, the way up to its finest level, and boxes as distributions."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        w = width
        self.stages = nn.ModuleList([nn.Sequential(conv_silu(3, w, 3, 2))])
        for k, blocks in ((1, 1), (2, 2), (4, 2), (8, 1)):
            stage = conv_silu(k * w, 2 * k * w, 3, 2), SplitStage(2 * k * w, 2 * k * w, blocks)
            self.stages.append(nn.Sequential(*stage))
        self.up = nn.ModuleList([SplitStage(24 * w, 8 * w, 1), SplitStage(12 * w, 4 * w, 1)])
        self.head = nn.Sequential(conv_silu(4 * w, 64, 3), nn.Conv2d(64, 144, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        levels = [x]
        for stage in self.stages:
            levels.append(stage(levels[-1]))
        x = levels[-1]
        for level, join in zip(levels[-2:-4:-1], self.up, strict=True):
            x = join(torch.cat([functional.interpolate(x, scale_factor=2.0), level], 1))
        boxes, classes = self.head(x).flatten(2).split((64, 80), 1)
        bins = boxes.view(1, 4, 16, -1).softmax(2) * torch.arange(16.0).view(1, 1, 16, 1)
        return torch.cat([bins.sum(2), classes.sigmoid()], 1)


class Residual(nn.Module):
    """Two convolutions behind group normalization and SiLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(32, inputs), nn.GroupNorm(32, outputs)])
        sizes = ((inputs, outputs), (outputs, outputs))
        self.convs = nn.ModuleList([nn.Conv2d(*size, 3, padding=1) for size in sizes])
        same = inputs == outputs
        self.skip = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for norm, conv in zip(self.norms, self.convs, strict=True):
            y = conv(functional.silu(norm(y)))
        return self.skip(x) + y


def decoder() -> Made:
    """Return the decoder of a variational autoencoder, as diffusion networks end with."""
    layers: list[nn.Module] = [nn.Conv2d(4, 128, 3, padding=1)]
    for inputs, outputs in ((128, 128), (128, 64), (64, 64)):
        layers += [Residual(inputs, outputs), nn.Upsample(scale_factor=2.0)]
    layers += [nn.GroupNorm(32, 64), nn.SiLU(), nn.Conv2d(64, 3, 3, padding=1)]
    return nn.Sequential(*layers).eval(), (torch.randn(1, 4, 16, 16),)


class WaveNet(nn.Module):
    """Dilated causal convolutions of one dimension with gates."""

    def __init__(self, width: int = 32, layers: int = 20) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, width, 1)
        self.reaches = [2 ** (k % 10) for k in range(layers)]
        self.gates = nn.ModuleList(
            [nn.Conv1d(width, 2 * width, 2, dilation=reach) for reach in self.reaches]
        )
        self.outs = nn.ModuleList([nn.Conv1d(width, width + 64, 1) for _ in range(layers)])
        self.last = nn.Sequential(nn.ReLU(), nn.Conv1d(64, 256, 1))
        self.width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skips = self.first(x), torch.zeros(1)
        for gate, out, reach in zip(self.gates, self.outs, self.reaches, strict=True):
            a, b = gate(functional.pad(x, (reach, 0))).chunk(2, 1)
            more, skip = out(torch.tanh(a) * torch.sigmoid(b)).split((self.width, 64), 1)
            x, skips = x + more, skips + skip
        return self.last(skips)


class GraphNet(nn.Module):
    """Three graph convolutions: rows are gathered, added by targets and divided by their number."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        sizes = ((64, width), (width, width), (width, 16))
        self.layers = nn.ModuleList([nn.Linear(*size) for size in sizes])

    def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        edges = torch.zeros(rows, 1).index_add(0, target, torch.ones(target.shape[0], 1))
        for layer in self.layers:
            x = layer(torch.relu(x))
            x = torch.zeros(rows, x.shape[1]).index_add(0, target, x[source]) / edges.clamp(min=1)
        return x


class Recommender(nn.Module):
    """DLRM: embeddings and a dense part, all pairs of which are multiplied."""

    def __init__(self, tables: int = 26, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(10_000, width) for _ in range(tables)])
        self.dense = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU())
        first, second = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("first", first)
        self.register_buffer("second", second)
        self.top = nn.Sequential(
            nn.Linear(width + len(first), 512), nn.ReLU(), nn.Linear(512, 1), nn.Sigmoid()
        )

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x = self.dense(dense)
        vectors = torch.stack([x, *(table(ids[:, k]) for k, table in enumerate(self.tables))], 1)
        pairs = vectors @ vectors.transpose(1, 2)
        return self.top(torch.cat([x, pairs[:, self.first, self.second]], 1))


_PLAIN = (
    *("efficientnet_v2_s", "maxvit_t", "swin_v2_t", "mobilenet_v3_small", "densenet169"),
    "regnet_x_800mf",
)
_EAGER = {"attn_implementation": "eager"}
_SMALL = {"num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1536, **_EAGER}
MODELS: dict[str, Callable[[], Made]] = {
    **{name: partial(vision, name) for name in _PLAIN},
    "segformer": partial(transformer, "Segformer", "pixel_values", image),
    "poolformer": partial(transformer, "PoolFormer", "pixel_values", image),
    "levit": partial(transformer, "Levit", "pixel_values", image),
    "convnextv2": partial(transformer, "ConvNextV2", "pixel_values", image),
    "clip_vision": partial(
        transformer, "CLIPVision", "pixel_values", image, hidden_size=384, **_SMALL
    ),
    "wav2vec2": partial(
        transformer, "Wav2Vec2", "input_values", lambda: (torch.randn(1, 16000),),
        hidden_size=384, **_SMALL,
    ),
    "albert": partial(
        transformer, "Albert", "input_ids", text, hidden_size=384, vocab_size=VOCABULARY, **_SMALL
    ),
    "deberta": partial(
        transformer, "DebertaV2", "input_ids", text, vocab_size=VOCABULARY, hidden_size=256,
        num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024,
        relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=64,
    ),
    "qwen2": partial(
        language, "Qwen2Config", "Qwen2ForCausalLM", "logits", hidden_size=256,
        intermediate_size=688, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=VOCABULARY, **_EAGER,
    ),
    "deeplab": segmenter,
    "r3d18": video,
    "unet3d": lambda: (UNet3D().eval(), (torch.randn(1, 1, 32, 32, 32),)),
    "mixer": lambda: (Mixer().eval(), image()),
    "nafnet": lambda: (NAFNet().eval(), image(128)),
    "edsr": lambda: (EDSR().eval(), image(64)),
    "pyramid": lambda: (with_statistics(Pyramid()), image(320)),
    "decoder": decoder,
    "wavenet": lambda: (WaveNet().eval(), (torch.randn(1, 1, 4096),)),
    "graph_net": lambda: (
        GraphNet().eval(),
        (torch.randn(2000, 64), *torch.randint(0, 2000, (2, 10_000))),
    ),
    "recommender": lambda: (
        Recommender().eval(), (torch.randn(32, 13), torch.randint(0, 10_000, (32, 26)))
    ),
}  # fmt: skip


def export(name: str, folder: Path) -> None:
    """Write one model, and its inputs."""
    model, inputs = MODELS[name]()
    names = [f"input{k}" for k in range(len(inputs))]
    save_inputs(folder / f"{name}.npz", names, inputs)
    path = folder / f"{name}.onnx"
    torch.onnx.export(model, inputs, path, input_names=names, verbose=False, **FORMS[""])
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    export_all(__doc__, MODELS, export)

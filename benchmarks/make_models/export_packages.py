"""Export networks of the packages that applications take them from, with PyTorch.

Detectors of ultralytics (YOLO), segmentation_models_pytorch, diffusion networks and autoencoders of
diffusers, volumes of MONAI, and detectors, videos and sound of torchvision and torchaudio. They are
for measurements beside those of the networks that kernels were tuned on. Writes NAME.onnx and
NAME.npz with inputs. Weights are seeded and random. Needs torch, onnxscript and those packages.
"""

# PyTorch and the libraries over it are not in the environment of `make lint`.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from export_models import FORMS, export_all, save_inputs, with_statistics
from torch import nn

Made = tuple[nn.Module, dict[str, torch.Tensor]]
Shapes = Mapping[str, tuple[int, ...]]
_TEXT = {"encoder_hidden_states": (1, 77, 512)}
_HEADS = {"num_attention_heads": 8, "attention_head_dim": 64}


class Tensors(nn.Module):
    """A model that is called with named or listed tensors, and returns all tensors of its result.

    Args:
        model: The model.
        names: Names of its inputs; empty: it takes them in order.
        constants: Further arguments.
        listed: Whether it takes one list of tensors.
    """

    def __init__(
        self, model: Any, names: list[str], constants: dict[str, Any], *, listed: bool = False
    ) -> None:
        super().__init__()
        self.model, self.names, self.constants, self.listed = model, names, constants, listed

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.listed:
            return tuple(_tensors(self.model(list(inputs))))
        if not self.names:
            return tuple(_tensors(self.model(*inputs)))
        return tuple(
            _tensors(self.model(**dict(zip(self.names, inputs, strict=True)), **self.constants))
        )


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    if hasattr(result, "values"):
        result = list(result.values())
    return (
        [t for item in result for t in _tensors(item)] if isinstance(result, (list, tuple)) else []
    )


def detector(name: str, size: int = 640) -> Made:
    """Return a network of ultralytics, its batch normalizations fused as its own exporter does."""
    from ultralytics.nn import tasks

    kinds = {"seg": "Segmentation", "pose": "Pose", "obb": "OBB", "cls": "Classification"}
    kind = "RTDETRDetection" if name.startswith("rtdetr") else kinds.get(name.split("-")[-1])
    make = getattr(tasks, f"{kind or 'Detection'}Model")
    model = with_statistics(make(f"{name}.yaml", verbose=False)).fuse(verbose=False)
    for module in model.modules():
        for key, value in (("export", True), ("format", "onnx")):
            if hasattr(module, key):
                setattr(module, key, value)
    return Tensors(model, [], {}), {"image": torch.randn(1, 3, size, size)}


def segmenter(kind: str, encoder: str, size: int = 256) -> Made:
    """Return a network of segmentation_models_pytorch."""
    import segmentation_models_pytorch as smp

    model = getattr(smp, kind)(encoder_name=encoder, encoder_weights=None, classes=4)
    return with_statistics(model), {"image": torch.randn(1, 3, size, size)}


def diffuser(kind: str, shapes: Shapes, constants: dict[str, Any], **sizes: Any) -> Made:
    """Return a network of diffusers that removes noise, and inputs of these shapes."""
    import diffusers

    inputs = {name: torch.randn(shape) for name, shape in shapes.items()}
    inputs["timestep"] = torch.tensor([0.5 if kind in ("Flux", "AuraFlow") else 10.0])
    kind += "Model" if kind.startswith("UNet") else "Transformer2DModel"
    model = getattr(diffusers, kind)(**sizes)
    return Tensors(model.eval(), list(inputs), constants), inputs


def decoder(kind: str, shape: tuple[int, ...], **sizes: Any) -> Made:
    """Return the decoder of an autoencoder of diffusers."""
    import diffusers

    model = getattr(diffusers, kind)(**sizes).eval()
    return Tensors(model.decode, [], {}), {"latents": torch.randn(shape)}


def volume(kind: str, size: int = 64, **sizes: Any) -> Made:
    """Return a network of MONAI over volumes of one channel."""
    import monai.networks.nets as nets

    model = getattr(nets, kind)(in_channels=1, out_channels=2, **sizes)
    return Tensors(with_statistics(model), [], {}), {"volume": torch.randn(1, 1, *[size] * 3)}


def vision(path: str, *shape: int) -> Made:
    """Return a network of torchvision, by its module and name; shapes of rank 3 for detectors."""
    import importlib

    module, name = path.rsplit(".", 1)
    make = getattr(importlib.import_module(f"torchvision.models.{module}"), name)
    inside = {} if module in ("video", "optical_flow") else {"weights_backbone": None}
    model = with_statistics(make(weights=None, **inside))
    detects = module == "detection"
    return Tensors(model, [], {}, listed=detects), {"image": torch.rand(shape)}


def sound(name: str, *shapes: tuple[int, ...], **sizes: Any) -> Made:
    """Return a network of torchaudio."""
    import torchaudio

    model = with_statistics(getattr(torchaudio.models, name)(**sizes))
    inputs = {f"x{k}": torch.randn(shape) for k, shape in enumerate(shapes)}
    return Tensors(model, [], {}), inputs


_LATENTS = {"hidden_states": (1, 4, 32, 32)}
_BLOCKS = {"block_out_channels": (64, 128, 256, 256)}
_LEVELS = {
    **_BLOCKS,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
}
_DETECTORS = (
    *("yolov3-tiny", "yolov5n", "yolov8n", "yolov9t", "yolov10n", "yolo11n", "yolo12n", "yolo26n"),
    *("yolov8n-seg", "yolo11n-pose", "yolo11n-obb", "yolov8n-cls", "rtdetr-l"),
)
_SEGMENTERS = {
    **{"Unet": "resnet34", "UnetPlusPlus": "efficientnet-b0", "MAnet": "resnet18"},
    **{"Linknet": "mobilenet_v2", "FPN": "resnext50_32x4d", "PSPNet": "resnet18"},
    **{"PAN": "resnet18", "DeepLabV3Plus": "mobilenet_v2", "UPerNet": "resnet18"},
    "Segformer": "mit_b0",
}
NETWORKS: dict[str, Callable[[], Made]] = {
    **{name.replace("-", "_"): (lambda name=name: detector(name)) for name in _DETECTORS},
    **{
        f"smp_{kind.lower()}": (lambda kind=kind, encoder=encoder: segmenter(kind, encoder))
        for kind, encoder in _SEGMENTERS.items()
    },
    "unet_condition": lambda: diffuser(
        "UNet2DCondition", {"sample": (1, 4, 32, 32), **_TEXT}, {},
        block_out_channels=(128, 256, 512, 512), cross_attention_dim=512, attention_head_dim=8,
    ),
    "unet_image": lambda: diffuser("UNet2D", {"sample": (1, 3, 64, 64)}, {}, **_BLOCKS),
    "sd3": lambda: diffuser(
        "SD3", {"hidden_states": (1, 16, 32, 32), **_TEXT, "pooled_projections": (1, 256)}, {},
        **_HEADS, sample_size=32, num_layers=4, joint_attention_dim=512, pos_embed_max_size=64,
        caption_projection_dim=512, pooled_projection_dim=256,
    ),
    "flux": lambda: diffuser(
        "Flux",
        {"hidden_states": (1, 256, 64), **_TEXT, "pooled_projections": (1, 256),
         "img_ids": (256, 3), "txt_ids": (77, 3)}, {},
        **_HEADS, num_layers=2, num_single_layers=4, joint_attention_dim=512,
        pooled_projection_dim=256, axes_dims_rope=(16, 24, 24),
    ),
    "auraflow": lambda: diffuser(
        "AuraFlow", {**_LATENTS, **_TEXT}, {}, **_HEADS, sample_size=32, num_mmdit_layers=2,
        num_single_dit_layers=2, joint_attention_dim=512, caption_projection_dim=512,
        pos_embed_max_size=256,
    ),
    "dit": lambda: diffuser(
        "DiT", _LATENTS, {"class_labels": torch.tensor([5])}, num_layers=4, num_attention_heads=8,
        attention_head_dim=48, sample_size=32,
    ),
    "vae": lambda: decoder("AutoencoderKL", (1, 4, 32, 32), **_LEVELS, latent_channels=4),
    "taesd": lambda: decoder("AutoencoderTiny", (1, 4, 32, 32)),
    "oobleck": lambda: decoder(
        "AutoencoderOobleck", (1, 64, 32), encoder_hidden_size=64, decoder_channels=64
    ),
    "volume_unet": lambda: volume(
        "UNet", spatial_dims=3, channels=(16, 32, 64, 128), strides=(2, 2, 2), num_res_units=2
    ),
    "segresnet": lambda: volume("SegResNet", init_filters=16),
    "dynunet": lambda: volume(
        "DynUNet", spatial_dims=3, kernel_size=[3] * 4, strides=[1, 2, 2, 2],
        upsample_kernel_size=[2] * 3,
    ),
    "vnet": lambda: volume("VNet"),
    "attention_unet": lambda: volume(
        "AttentionUnet", spatial_dims=3, channels=(16, 32, 64), strides=(2, 2)
    ),
    "highresnet": lambda: volume("HighResNet", 48, spatial_dims=3),
    "unetr": lambda: volume(
        "UNETR", img_size=(64, 64, 64), hidden_size=384, mlp_dim=1536, num_heads=6
    ),
    "swin_unetr": lambda: volume("SwinUNETR", feature_size=24),
    "fasterrcnn": lambda: vision("detection.fasterrcnn_mobilenet_v3_large_320_fpn", 3, 320, 320),
    "retinanet": lambda: vision("detection.retinanet_resnet50_fpn_v2", 3, 320, 320),
    "ssdlite": lambda: vision("detection.ssdlite320_mobilenet_v3_large", 3, 320, 320),
    "maskrcnn": lambda: vision("detection.maskrcnn_resnet50_fpn", 3, 256, 256),
    "fcn_resnet50": lambda: vision("segmentation.fcn_resnet50", 1, 3, 224, 224),
    "s3d": lambda: vision("video.s3d", 1, 3, 16, 224, 224),
    "r2plus1d": lambda: vision("video.r2plus1d_18", 1, 3, 8, 112, 112),
    "wav2letter": lambda: sound("Wav2Letter", (1, 1, 16000)),
    "conv_tasnet": lambda: sound("ConvTasNet", (1, 1, 8000)),
}  # fmt: skip


def export(name: str, folder: Path) -> None:
    """Write one network, and inputs; by the TorchScript exporter if the other one fails."""
    model, inputs = NETWORKS[name]()
    names, values = list(inputs), tuple(inputs.values())
    save_inputs(folder / f"{name}.npz", names, values)
    path = folder / f"{name}.onnx"
    detects = name.replace("_", "-") in _DETECTORS or name in (
        "fasterrcnn",
        "retinanet",
        "maskrcnn",
    )
    for form in ("_ts17",) if detects else ("", "_ts17"):
        try:
            torch.onnx.export(
                model.eval(), values, path, input_names=names, verbose=False, **FORMS[form]
            )
            break
        except Exception:
            if form:
                raise
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    export_all(__doc__, NETWORKS, export)

"""Export one small network of each architecture of timm, the library of image models, with PyTorch.

Of each architecture a network of moderate size: convolutions and transformers of many kinds, for
measurements beside those of the networks that kernels were tuned on. Writes NAME.onnx (dynamo
exporter) and NAME.npz with an image. Weights are seeded and random. Needs torch, timm and
onnxscript.
"""

# PyTorch and the libraries over it are not in the environment of `make lint`.
# pyright: reportMissingImports=false

from __future__ import annotations

from pathlib import Path

import torch
from export_models import FORMS, export_all, save_inputs, with_statistics

NETWORKS = [
    "convnext_atto", "convnextv2_atto", "swin_tiny_patch4_window7_224", "swinv2_cr_tiny_224",
    "mobilevit_xs", "mobilevitv2_050", "coatnet_pico_rw_224", "maxvit_pico_rw_256",
    "ghostnet_100", "repvgg_a0", "hrnet_w18_small", "res2net50_14w_8s", "vit_small_patch16_224",
    "mixer_s16_224", "poolformer_s12", "edgenext_x_small", "eca_nfnet_l0", "cspdarknet53",
    "dla34", "xcit_nano_12_p16_224", "tnt_s_patch16_224", "pvt_v2_b0", "mnasnet_100",
    "regnety_004", "tf_efficientnetv2_b0", "inception_v3", "xception41", "resnest14d",
    "skresnet18", "efficientformer_l1", "fastvit_t8", "tiny_vit_5m_224", "visformer_tiny",
    "convmixer_768_32", "hgnetv2_b0", "lcnet_100", "tresnet_m", "ese_vovnet19b_dw", "selecsls42b",
    "mambaout_femto", "rdnet_tiny", "starnet_s1", "efficientvit_b0", "efficientvit_m0",
    "nextvit_small", "repghostnet_100", "mobilenetv4_conv_small", "mobileone_s0", "gernet_s",
    "crossvit_9_240", "cait_xxs24_224", "volo_d1_224", "davit_tiny", "focalnet_tiny_srf",
    "gcvit_xxtiny", "inception_next_atto", "levit_128s", "beit_base_patch16_224",
    "eva02_tiny_patch14_224", "deit3_small_patch16_224", "resmlp_12_224", "gmixer_24_224",
    "gmlp_s16_224", "convit_tiny", "sequencer2d_s", "pit_ti_224", "mvitv2_tiny", "halonet26t",
    "lambda_resnet26t", "bat_resnext26ts", "botnet26t_256", "sebotnet33ts_256", "dpn68",
    "vgg11_bn", "fbnetc_100", "hardcorenas_a", "tinynet_a", "mixnet_s", "rexnet_100",
    "semnasnet_100", "spnasnet_100", "dm_nfnet_f0", "repvit_m0_9", "shvit_s1", "swiftformer_xs",
    "vitamin_small_224", "efficientnet_lite0", "resnet50_gn", "resnetv2_50", "seresnext26t_32x4d",
    "pnasnet5large", "nasnetalarge",
]  # fmt: skip


def export(name: str, folder: Path) -> None:
    """Write one network, and an image of the size that it takes."""
    import timm

    model = with_statistics(timm.create_model(name, pretrained=False))
    image = (torch.randn(1, *model.default_cfg["input_size"]),)
    save_inputs(folder / f"{name}.npz", ["image"], image)
    path = folder / f"{name}.onnx"
    torch.onnx.export(model, image, path, input_names=["image"], verbose=False, **FORMS[""])
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    export_all(__doc__, NETWORKS, export)

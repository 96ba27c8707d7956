"""Export one network of each architecture of Hugging Face's transformers, with PyTorch.

Each has the widths of its default configuration, or moderate ones, and few layers: encoders and
decoders of text, of images, of sound, of several of these, and of time series. They are for
measurements beside those of the networks that kernels were tuned on. Writes NAME.onnx (dynamo
exporter) and NAME.npz with inputs. Weights are seeded and random. Needs torch, transformers and
onnxscript.
"""

# PyTorch and the libraries over it are not in the environment of `make lint`.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from export_models import FORMS, export_all, save_inputs, with_statistics
from torch import nn

LENGTH = 128
VOCABULARY = 8000
_LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"),
    *("decoder_layers", "num_encoder_layers", "num_decoder_layers"),
)
# Moderate widths, where the default is a model of billions of weights.
_DECODER = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8}
_GROUPED = {**_DECODER, "num_key_value_heads": 4, "head_dim": 64}
_GPT = {"n_embd": 512, "n_head": 8}
_EXPERTS = {**_GROUPED, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
_PAIR = {
    **{"d_model": 512, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048},
    **{"encoder_attention_heads": 8, "decoder_attention_heads": 8},
}
_PATCHES = {"context_length": 512, "num_input_channels": 7, "patch_length": 16, "patch_stride": 8}


class Named(nn.Module):
    """A model that is called with named tensors and returns the first tensors of its result."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = self.model(**dict(zip(self.names, inputs, strict=True)))
        values = found.values() if hasattr(found, "values") else found
        return tuple(v for v in values if isinstance(v, torch.Tensor))[:2]


def text(length: int = LENGTH) -> dict[str, torch.Tensor]:
    """Return a row of token ids, and a mask whose tail is off."""
    mask = torch.ones(1, length, dtype=torch.int64)
    mask[:, length - 20 :] = 0
    return {"input_ids": torch.randint(5, VOCABULARY, (1, length)), "attention_mask": mask}


def ids(length: int = LENGTH) -> dict[str, torch.Tensor]:
    """Return a row of token ids."""
    return {"input_ids": torch.randint(5, VOCABULARY, (1, length))}


def pair(length: int = 64) -> dict[str, torch.Tensor]:
    """Return the text for an encoder and the beginning of its decoder's text."""
    return {**text(length), "decoder_input_ids": torch.randint(5, VOCABULARY, (1, 16))}


def image(size: int = 224) -> dict[str, torch.Tensor]:
    """Return a random image."""
    return {"pixel_values": torch.randn(1, 3, size, size)}


def video(frames: int = 8) -> dict[str, torch.Tensor]:
    """Return the images of a short film."""
    return {"pixel_values": torch.randn(1, frames, 3, 224, 224)}


def sound() -> dict[str, torch.Tensor]:
    """Return one second of sound."""
    return {"input_values": torch.randn(1, 16000)}


def boxes(count: int) -> torch.Tensor:
    """Return random boxes in an image."""
    return torch.rand(1, count, 4)


def features(*shape: int, name: str = "input_features") -> Callable[[], dict[str, torch.Tensor]]:
    """Return a function that makes a tensor of frequencies by time."""
    return lambda: {name: torch.randn(1, *shape)}


Sizes = dict[str, Any]
Inputs = Callable[[], dict[str, torch.Tensor]]

# Encoders of text: sizes that differ from the default.
_ENCODERS: dict[str, Sizes] = {
    "roberta": {},
    "electra": {"hidden_size": 256},
    "mpnet": {},
    "squeezebert": {},
    "mobilebert": {"num_hidden_layers": 6},
    "convbert": {},
    "roformer": {},
    "nystromformer": {},
    "ibert": {},
    "rembert": {},
    "ernie": {},
    "megatron-bert": {"hidden_size": 512, "num_attention_heads": 8},
    "xlm": {"emb_dim": 512, "n_heads": 8},
    "esm": {**_DECODER, "vocab_size": VOCABULARY, "pad_token_id": 1, "token_dropout": False},
    "modernbert": {},
    "big_bird": {"attention_type": "original_full"},
    "deberta-v2": {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
    "layoutlm": {},
    "splinter": {},
    "yoso": {},
    "ctrl": {**_GPT, "dff": 2048},
    "openai-gpt": {},
}
# Decoders of text, with the product that gives the next token.
_DECODERS: dict[str, Sizes] = {
    "gpt_neo": {"hidden_size": 512, "num_heads": 8, "attention_types": [[["global", "local"], 2]]},
    "gpt_neox": _DECODER,
    "gptj": {**_GPT, "rotary_dim": 32},
    "opt": {**_DECODER, "ffn_dim": 2048, "word_embed_proj_dim": 512},
    "bloom": {"hidden_size": 512, "n_head": 8},
    "codegen": {**_GPT, "rotary_dim": 32},
    "falcon": {"hidden_size": 512, "num_attention_heads": 8},
    "phi": {**_DECODER, "num_key_value_heads": 8},
    "phi3": _GROUPED,
    "mistral": _GROUPED,
    "qwen3": _GROUPED,
    "gemma": _GROUPED,
    "gemma2": _GROUPED,
    "gemma3_text": _GROUPED,
    "stablelm": _GROUPED,
    "olmo": _GROUPED,
    "olmo2": _GROUPED,
    "starcoder2": _GROUPED,
    "cohere": _GROUPED,
    "granite": _GROUPED,
    "glm": _GROUPED,
    "smollm3": _GROUPED,
    "nemotron": _GROUPED,
    "gpt_bigcode": _GPT,
    "mpt": {"d_model": 512, "n_heads": 8},
    "persimmon": {**_DECODER, "num_key_value_heads": 8},
    "xglm": {"d_model": 512, "ffn_dim": 2048, "attention_heads": 8},
    "biogpt": _DECODER,
    "lfm2": {**_GROUPED, "layer_types": ["conv", "full_attention"] * 2},
    "recurrent_gemma": {**_DECODER, "lru_width": 512},
    "mixtral": {**_EXPERTS, "num_local_experts": 4},
    "qwen2_moe": {**_EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 512},
    "qwen3_moe": {**_EXPERTS, "num_experts": 8},
    "gpt_oss": {**_EXPERTS, "num_local_experts": 4},
    "deepseek_v3": {
        **_DECODER,
        **{"num_key_value_heads": 8, "moe_intermediate_size": 256, "num_experts_per_tok": 2},
        **{"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
        **{"q_lora_rank": 256, "kv_lora_rank": 128},
    },
}
_TRANSLATORS: dict[str, Sizes] = {
    "bart": _PAIR,
    "mbart": _PAIR,
    "marian": _PAIR,
    "pegasus": _PAIR,
    "m2m_100": _PAIR,
    "longt5": {"d_kv": 64, "d_ff": 1024, "num_heads": 8},
    "umt5": {"d_kv": 64, "d_ff": 1024, "num_heads": 8},
}
_IMAGES: dict[str, Sizes] = {
    **{"vit": {}, "deit": {}, "beit": {}, "dinov2": {}, "dinov2_with_registers": {}},
    **{"dinov3_vit": {}, "ijepa": {}, "vit_msn": {}, "vitdet": {}, "siglip_vision_model": {}},
    **{"aimv2_vision_model": {}, "pixio": {}, "data2vec-vision": {}, "hiera": {}, "yolos": {}},
    **{"mobilevit": {}, "mobilevitv2": {}, "pvt": {}, "pvt_v2": {}, "swiftformer": {}},
    **{"focalnet": {}, "efficientnet": {}, "bit": {}, "resnet": {}, "regnet": {}, "textnet": {}},
    **{"mobilenet_v1": {}, "mobilenet_v2": {}, "dpt": {}, "glpn": {}},
    "swin": {"depths": [1, 1, 2, 1]},
    "swinv2": {"depths": [1, 1, 2, 1]},
    "convnext": {"depths": [1, 1, 3, 1]},
}
_SOUNDS = ("hubert", "wavlm", "unispeech", "data2vec-audio", "sew", "sew-d", "wav2vec2-conformer")


def transcriber(*shape: int) -> Inputs:
    """Return a function that makes frequencies by time, and the beginning of their text."""
    made = features(*shape)
    return lambda: {**made(), "decoder_input_ids": torch.randint(5, VOCABULARY, (1, 16))}


def steps() -> dict[str, torch.Tensor]:
    """Return twenty steps of an agent."""
    sizes = {"states": 17, "actions": 4, "rewards": 1, "returns_to_go": 1}
    made = {name: torch.randn(1, 20, size) for name, size in sizes.items()}
    return {**made, "timesteps": torch.arange(20)[None], "attention_mask": torch.ones(1, 20)}


# By name: the end of the class of `transformers` that makes the model, inputs and sizes.
NETWORKS: dict[str, tuple[str, Inputs, Sizes]] = {
    **{name: ("", text, sizes) for name, sizes in _ENCODERS.items()},
    **{name: ("ForCausalLM", text, sizes) for name, sizes in _DECODERS.items()},
    **{name: ("", pair, sizes) for name, sizes in _TRANSLATORS.items()},
    **{name: ("", image, sizes) for name, sizes in _IMAGES.items()},
    **{name: ("", sound, {}) for name in _SOUNDS},
    "fnet": ("", ids, {}),
    "canine": ("", ids, {}),
    "mamba": ("ForCausalLM", ids, {"hidden_size": 384, "num_hidden_layers": 2}),
    "rwkv": ("", ids, {"hidden_size": 384, "attention_hidden_size": 384, "num_hidden_layers": 2}),
    "detr": ("", lambda: image(256), {"backbone_config": "resnet"}),
    "rt_detr": ("", lambda: image(320), {}),
    "swin2sr": ("", lambda: image(64), {}),
    "depth_anything": ("ForDepthEstimation", image, {}),
    "zoedepth": ("ForDepthEstimation", image, {}),
    "superpoint": ("ForKeypointDetection", image, {}),
    "upernet": ("ForSemanticSegmentation", image, {}),
    "videomae": ("", video, {"num_frames": 8}),
    "vivit": ("", video, {"num_frames": 8}),
    "audio-spectrogram-transformer": (
        "",
        features(256, 128, name="input_values"),
        {"max_length": 256},
    ),
    "wav2vec2-bert": ("", features(100, 160), {}),
    "dac": ("", features(1, 16000, name="input_values"), {}),
    "whisper": ("", transcriber(80, 400), {**_PAIR, "max_source_positions": 200}),
    "speech_to_text": ("", transcriber(200, 80), {}),
    "clip": ("", lambda: {**text(64), **image()}, {}),
    "siglip": ("", lambda: {**ids(64), **image()}, {}),
    "blip": ("", lambda: {**text(32), **image()}, {}),
    "visual_bert": ("", lambda: {**text(32), **features(36, 512, name="visual_embeds")()}, {}),
    "lxmert": (
        "",
        lambda: {**text(32), "visual_feats": torch.randn(1, 36, 2048), "visual_pos": boxes(36)},
        {},
    ),
    "perceiver": (
        "",
        features(256, 768, name="inputs"),
        {"num_latents": 128, "d_latents": 512},
    ),
    "patchtst": ("", features(512, 7, name="past_values"), _PATCHES),
    "patchtsmixer": ("", features(512, 7, name="past_values"), _PATCHES),
    "decision_transformer": ("", steps, {}),
}


def _config(name: str, sizes: Sizes) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[name]
    default = kind()
    known = vars(default)
    few: Sizes = {key: 4 for key in _LAYERS if isinstance(known.get(key), int)}
    if "layer_types" in known:
        few["layer_types"] = None  # follow from the number of layers
    if isinstance(getattr(default, "vocab_size", None), int):
        few["vocab_size"] = VOCABULARY
        tokens = {key: value for key, value in known.items() if key.endswith("_token_id")}
        few |= {key: 0 for key, v in tokens.items() if isinstance(v, int) and v >= VOCABULARY}
    if sizes.get("backbone_config") == "resnet":
        resnet = CONFIG_MAPPING["resnet"](out_features=["stage4"])
        none = {"backbone": None, "use_timm_backbone": False, "use_pretrained_backbone": False}
        sizes = {**sizes, "backbone_config": resnet, **none}
    return kind(**{**few, **sizes})


def network(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a network and its inputs by name."""
    import transformers

    task, inputs, sizes = NETWORKS[name]
    config = _config(name, sizes)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if "num_experts_per_tok" in sizes:
        config._experts_implementation = "batched_mm"  # grouped products have no form in ONNX
    model = getattr(transformers, f"AutoModel{task}").from_config(config)
    return with_statistics(model), inputs()


def export(name: str, folder: Path) -> None:
    """Write one network, and inputs."""
    model, inputs = network(name)
    names = list(inputs)
    values = tuple(inputs.values())
    stem = name.replace("-", "_")
    save_inputs(folder / f"{stem}.npz", names, values)
    path = folder / f"{stem}.onnx"
    torch.onnx.export(
        Named(model, names).eval(), values, path, input_names=names, verbose=False, **FORMS[""]
    )
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    export_all(__doc__, NETWORKS, export)

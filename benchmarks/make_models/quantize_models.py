"""Quantise models with ONNX Runtime's tools and random calibration data, for int8 measurements.

    python benchmarks/make_models/quantize_models.py resnet50.onnx mobilenetv2.onnx -o quantised

writes ``NAME_qdq.onnx`` (unsigned activations, signed weights, per channel), ``NAME_qdq_s8.onnx``
(signed, per tensor) and ``NAME_qdq_u8.onnx`` (unsigned weights, per tensor, for which ONNX
Runtime's kernels are exact on machines without a dot product of bytes). Compare with
``subgraph bench FILE --vs onnxruntime`` and ``subgraph accuracy MODEL --quantized FILE``.

``--weights`` writes ``NAME_w4_f32.onnx`` and ``NAME_w4_s8.onnx`` instead: products of language
models with weights of 4 bits in blocks of 32 (MatMulNBits), whose inputs are float32
(``accuracy_level=1``), or may be rounded to int8 (``accuracy_level=4``); and ``NAME_w8.onnx``:
weights of 8 bits behind a DequantizeLinear, with a scale for each column.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper
from onnx import numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_static,
)
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from onnxruntime.quantization.shape_inference import quant_pre_process

import subgraph as sg
from subgraph.tools.cli_inputs import input_arrays, ports

FORMS: dict[str, dict[str, Any]] = {
    "qdq": {"per_channel": True, "activation_type": QuantType.QUInt8},
    "qdq_s8": {"activation_type": QuantType.QInt8},
    "qdq_u8": {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QUInt8},
}

LEVELS = {"w4_f32": 1, "w4_s8": 4}  # accuracy_level of MatMulNBits


class RandomData(CalibrationDataReader):
    """Random inputs of a model; a symbolic dimension has size 1."""

    def __init__(self, model: Path, count: int) -> None:
        """Draw ``count`` sets of inputs for ``model``."""
        inputs = ports(sg.load(model))
        self._sets = iter([input_arrays(inputs, {}, {}, number) for number in range(count)])

    def get_next(self) -> Any:
        """Return the next inputs, None at the end."""
        return next(self._sets, None)


def quantize_weights(model: Path, output: Path) -> None:
    """Write the forms of ``model`` with weights of 4 or 8 bits, and its inputs beside them."""
    made: dict[str, Any] = {"w8": with_dequantized_weights(onnx.load(model))}
    for name, level in LEVELS.items():
        quantizer = MatMulNBitsQuantizer(
            onnx.load(model), block_size=32, is_symmetric=True, accuracy_level=level
        )
        quantizer.process()
        wrapper: Any = quantizer.model
        made[name] = wrapper.model
    for name, quantized in made.items():
        target = output / f"{model.stem}_{name}.onnx"
        onnx.save(quantized, target)
        inputs = model.with_suffix(".npz")
        if inputs.exists():
            shutil.copy(inputs, target.with_suffix(".npz"))
        print(target)


def with_dequantized_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Give each MatMul with a constant matrix int8 weights and a DequantizeLinear."""
    graph = model.graph
    weights = {held.name: held for held in graph.initializer}
    conversions: dict[str, onnx.NodeProto] = {}
    for node in graph.node:
        held = weights.get(node.input[1]) if node.op_type == "MatMul" else None
        if held is None or len(held.dims) != 2 or held.data_type != onnx.TensorProto.FLOAT:
            continue
        if held.name not in conversions:
            numbers = numpy_helper.to_array(held)
            scales = np.maximum(np.abs(numbers).max(axis=0) / 127, 1e-9).astype(np.float32)
            rounded = np.rint(numbers / scales).astype(np.int8)
            names = [f"{held.name}_int8", f"{held.name}_scales"]
            for array, name in zip((rounded, scales), names, strict=True):
                graph.initializer.append(numpy_helper.from_array(array, name))
            conversions[held.name] = onnx.helper.make_node(
                "DequantizeLinear", names, [f"{held.name}_float"], axis=1
            )
        node.input[1] = conversions[held.name].output[0]
    nodes = [*conversions.values(), *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    for name in conversions:  # a weight with other users stays
        if not any(name in node.input for node in nodes):
            graph.initializer.remove(weights[name])
    return model


def main() -> None:
    """Quantise the models named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("quantised"))
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--weights", action="store_true", help="weights of 4 and 8 bits")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    for model in args.models:
        if args.weights:
            quantize_weights(model, args.output)
            continue
        prepared = args.output / f"{model.stem}.onnx"
        quant_pre_process(model, prepared, skip_symbolic_shape=True)
        for name, form in FORMS.items():
            target = args.output / f"{model.stem}_{name}.onnx"
            options: dict[str, Any] = {"weight_type": QuantType.QInt8, **form}
            data = RandomData(prepared, args.samples)
            quantize_static(prepared, target, data, quant_format=QuantFormat.QDQ, **options)
            print(target)


if __name__ == "__main__":
    main()

"""The nine light models of the onnx package, with random weights of realistic scale.

In the package their weights are ConstantOfShape and their outputs are constant, so that wrong
kernels would pass. Here every such weight becomes a seeded random initializer of the usual scale,
and the classifier is rescaled so that its logits have unit spread. Needs onnx and onnxruntime.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from models import onnxruntime_session
from onnx import numpy_helper

from subgraph.graph.types import Array

FOLDER = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
NAMES = sorted(path.stem for path in FOLDER.glob("light_*.onnx"))
_VIEWS = {"Reshape", "Unsqueeze", "Transpose", "Squeeze", "Identity"}


class _Model:
    """A model with look-up tables of its initializers and of the users of values."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        self.graph = proto.graph
        self.initializers = {t.name: t for t in self.graph.initializer}
        self.users: dict[str, list[tuple[onnx.NodeProto, int]]] = defaultdict(list)
        for node in self.graph.node:
            for position, name in enumerate(node.input):
                self.users[name].append((node, position))

    def real_user(self, name: str) -> tuple[onnx.NodeProto, int]:
        """Return the node that uses a weight, behind view ops, and the position of the input."""
        node, position = self.users[name][0]
        while node.op_type in _VIEWS and position == 0 and self.users[node.output[0]]:
            node, position = self.users[node.output[0]][0]
        return node, position


def light_model(name: str) -> onnx.ModelProto:
    """Return light model ``name`` (see NAMES) with random weights."""
    proto = onnx.load(FOLDER / f"{name}.onnx")
    model = _Model(proto)
    rng = np.random.default_rng(0)
    fillers = [
        node
        for node in proto.graph.node
        if node.op_type == "ConstantOfShape" and node.input[0] in model.initializers
    ]
    for node in fillers:
        shape = numpy_helper.to_array(model.initializers[node.input[0]]).tolist()
        fill = numpy_helper.to_array(node.attribute[0].t) if node.attribute else np.zeros(1, "f4")
        user, position = model.real_user(node.output[0])
        if fill.dtype.kind == "f":
            array = _weight(user, position, shape, rng).astype(fill.dtype).reshape(shape)
        else:
            array = np.full(shape, fill.ravel()[0], fill.dtype)
        proto.graph.initializer.append(numpy_helper.from_array(array, node.output[0]))
        proto.graph.node.remove(node)
    _drop_unused(proto)
    proto.ir_version = 8
    _rescale_classifier(proto)
    return proto


def _weight(user: onnx.NodeProto, position: int, shape: list[int], rng: Any) -> Array:
    if user.op_type == "Conv" and position == 1:
        return rng.standard_normal(shape) * np.sqrt(2 / max(1, np.prod(shape[1:])))
    if user.op_type in ("Gemm", "MatMul") and position == 1:
        transposed = any(a.name == "transB" and a.i for a in user.attribute)
        return rng.standard_normal(shape) * np.sqrt(2 / max(1, shape[1 if transposed else 0]))
    if user.op_type == "BatchNormalization":
        if position in (1, 4):
            return rng.uniform(0.5, 1.5, shape) * (0.7 if position == 1 else 1)
        return rng.standard_normal(shape) * 0.1
    if user.op_type == "Mul":
        return rng.uniform(0.5, 1.5, shape)
    return rng.standard_normal(shape) * 0.05


def _drop_unused(proto: onnx.ModelProto) -> None:
    graph = proto.graph
    used = {name for node in graph.node for name in node.input} | {o.name for o in graph.output}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    weights = {tensor.name for tensor in kept}
    inputs = [i for i in graph.input if i.name in used and i.name not in weights]
    del graph.input[:]
    graph.input.extend(inputs)


def _rescale_classifier(proto: onnx.ModelProto) -> None:
    """Scale the classifier for unit spread of the logits, so that Softmax does not saturate."""
    softmax = [node for node in proto.graph.node if node.op_type == "Softmax"]
    if not softmax:
        return
    probe = onnx.ModelProto()
    probe.CopyFrom(proto)
    del probe.graph.output[:]
    probe.graph.output.append(
        onnx.helper.make_tensor_value_info(softmax[0].input[0], onnx.TensorProto.FLOAT, None)
    )
    session = onnxruntime_session(probe.SerializeToString())
    entry = session.get_inputs()[0]
    image = np.random.default_rng(1).standard_normal(entry.shape).astype(np.float32)
    spread = float(np.std(np.asarray(session.run(None, {entry.name: image})[0])))
    makers = {name: node for node in proto.graph.node for name in node.output}
    name = next(n for n in reversed(proto.graph.node) if n.op_type in ("Gemm", "Conv")).input[1]
    while name in makers:
        name = makers[name].input[0]
    for tensor in proto.graph.initializer:
        if tensor.name == name:
            array = (numpy_helper.to_array(tensor) / spread).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def main() -> None:
    """Write all nine into the folder named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where to write the models")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        onnx.save(light_model(name), folder / f"{name}.onnx")
        print(folder / f"{name}.onnx")


if __name__ == "__main__":
    main()

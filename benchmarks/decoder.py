"""Time of the steps of a language model with weights of 4 bits, beside ONNX Runtime.

usage: python benchmarks/decoder.py [--layers 4] [--width 512] [--prompt 20] [--steps 100]
       [--level 4] [--threads 1] [--only subgraph] [--save decoder.onnx]

The model has the form that exporters of ONNX Runtime write: MatMulNBits, GroupQueryAttention with
rotary embeddings, a cache that is an input and an output, normalization of root mean squares.
Weights are random. Steps of both runtimes alternate; each feeds its own results back. The table has
the time of the prompt, of the first steps, and the median of the later ones. With several threads a
process should have one runtime (``--only``), whose threads no other's disturb by waiting.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from models import onnxruntime_session
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from rich.table import Table

import subgraph as sg
from subgraph.graph.types import Array

BLOCK, HEAD, VOCABULARY, POSITIONS = 32, 64, 4000, 4096
_FIRST = 8  # steps that plan, bind or allocate
Runner = Callable[[Mapping[str, Array]], Mapping[str, Array]]


class Decoder:
    """Writes the model.

    Attributes:
        layers: Layers.
        width: Elements of a token, a multiple of 256.
        keys: Heads of keys, a quarter of those of queries.
    """

    def __init__(self, layers: int, width: int, level: int) -> None:
        """Begin without nodes; ``level`` is ``accuracy_level`` of MatMulNBits."""
        self.layers, self.width, self._level = layers, width, level
        self.heads = width // HEAD
        self.keys = self.heads // 4
        self._rng = np.random.default_rng(0)
        self._nodes: list[Any] = []
        self._weights: list[Any] = []

    def _weight(self, name: str, array: Array) -> str:
        self._weights.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def _node(self, op_type: str, inputs: list[str], outputs: list[str], **attributes: Any) -> str:
        own = op_type in ("MatMulNBits", "GroupQueryAttention", "SkipSimplifiedLayerNormalization")
        domain = "com.microsoft" if own else ""
        node = helper.make_node(op_type, inputs, outputs, domain=domain)
        node.attribute.extend(helper.make_attribute(*pair) for pair in attributes.items())
        self._nodes.append(node)
        return outputs[0]

    def _product(self, x: str, name: str, depth: int, columns: int) -> str:
        packed = self._rng.integers(0, 256, (columns, depth // BLOCK, BLOCK // 2)).astype(np.uint8)
        scales = self._rng.uniform(0.001, 0.004, columns * depth // BLOCK).astype(np.float32)
        weights = [self._weight(f"{name}.q", packed), self._weight(f"{name}.s", scales)]
        form = {"K": depth, "N": columns, "bits": 4, "block_size": BLOCK}
        return self._node("MatMulNBits", [x, *weights], [name], accuracy_level=self._level, **form)

    def _normalized(self, name: str, residual: str, x: str) -> tuple[str, str]:
        gain = self._weight(f"{name}.gain", np.ones(self.width, np.float32))
        outputs = [name, "", "", f"{name}.sum"]
        self._node("SkipSimplifiedLayerNormalization", [residual, x, gain], outputs, epsilon=1e-5)
        return name, f"{name}.sum"

    def _layer(self, k: int, x: str, residual: str) -> tuple[str, str]:
        width, inner = self.width, 11 * self.width // 4 // BLOCK * BLOCK
        qkv = self._product(x, f"qkv{k}", width, (self.heads + 2 * self.keys) * HEAD)
        attended = self._node(
            "GroupQueryAttention",
            [qkv, "", "", f"past.{k}.k", f"past.{k}.v", "last", "total", "cos", "sin"],
            [f"attended{k}", f"present.{k}.k", f"present.{k}.v"],
            num_heads=self.heads,
            kv_num_heads=self.keys,
            do_rotary=1,
            scale=HEAD**-0.5,
        )
        product = self._product(attended, f"out{k}", width, width)
        x, residual = self._normalized(f"norm{k}", residual, product)
        gate, up = (self._product(x, f"{name}{k}", width, inner) for name in ("gate", "up"))
        gate = self._node("Mul", [gate, self._node("Sigmoid", [gate], [f"open{k}"])], [f"silu{k}"])
        joined = self._node("Mul", [gate, up], [f"joined{k}"])
        product = self._product(joined, f"down{k}", inner, width)
        return self._normalized(f"after{k}", residual, product)

    def model(self) -> onnx.ModelProto:
        """Return the model."""
        table = self._rng.standard_normal((VOCABULARY, self.width)).astype(np.float32)
        residual = self._node(
            "Gather", [self._weight("table", 0.1 * table), "tokens"], ["embedded"]
        )
        axis, one = self._weight("axis", np.array([1])), self._weight("one", np.array(1))
        ends = self._node("ReduceSum", ["mask", axis], ["length"], keepdims=0)
        ends = self._node("Sub", [ends, one], ["before"])
        self._node("Cast", [ends], ["last"], to=TensorProto.INT32)
        size = self._node("Squeeze", [self._node("Shape", ["mask"], ["s"], start=1)], ["size"])
        self._node("Cast", [size], ["total"], to=TensorProto.INT32)
        steps = 10000.0 ** (np.arange(HEAD // 2) * -2 / HEAD)
        angles = np.arange(POSITIONS)[:, None] * steps
        self._weight("cos", np.cos(angles).astype(np.float32))
        self._weight("sin", np.sin(angles).astype(np.float32))
        gain = self._weight("gain", np.ones(self.width, np.float32))
        x = self._node("SimplifiedLayerNormalization", [residual, gain], ["first"], epsilon=1e-5)
        for k in range(self.layers):
            x, residual = self._layer(k, x, residual)
        self._product(x, "logits", self.width, VOCABULARY)
        cache = [f"{k}.{part}" for k in range(self.layers) for part in "kv"]
        real, whole = TensorProto.FLOAT, TensorProto.INT64
        inputs = [("tokens", whole, ["B", "S"]), ("mask", whole, ["B", "T"])]
        inputs += [(f"past.{name}", real, ["B", self.keys, "P", HEAD]) for name in cache]
        outputs = [("logits", real, ["B", "S", VOCABULARY])]
        outputs += [(f"present.{name}", real, ["B", self.keys, "T", HEAD]) for name in cache]
        ports = [
            [helper.make_tensor_value_info(name, kind, shape) for name, kind, shape in each]
            for each in (inputs, outputs)
        ]
        return helper.make_model(
            helper.make_graph(self._nodes, "decoder", ports[0], ports[1], self._weights),
            opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)],
            ir_version=9,
        )


def runners(model: onnx.ModelProto, threads: int) -> dict[str, Runner]:
    """Return functions that run the model on Subgraph and on ONNX Runtime."""
    session = onnxruntime_session(model.SerializeToString(), threads)
    names = [value.name for value in session.get_outputs()]
    request = sg.compile_model(
        sg.load(model), "CPU", {"INFERENCE_NUM_THREADS": threads}
    ).create_infer_request()

    def by_peer(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        results: Any = session.run(None, dict(inputs))
        return dict(zip(names, results, strict=True))

    return {"subgraph": lambda inputs: request.infer(inputs), "onnxruntime": by_peer}


def generate(
    decoder: Decoder, both: Mapping[str, Runner], prompt: int, steps: int
) -> dict[str, list[float]]:
    """Return the seconds of the prompt and of each step, by runtime.

    Args:
        decoder: The model's sizes.
        both: The runtimes.
        prompt: Tokens of the prompt.
        steps: Steps after the prompt.
    """
    rng = np.random.default_rng(1)
    empty = np.zeros((1, decoder.keys, 0, HEAD), np.float32)
    caches = {
        name: {f"past.{k}.{part}": empty for k in range(decoder.layers) for part in "kv"}
        for name in both
    }
    times: dict[str, list[float]] = {name: [] for name in both}
    for step in range(steps + 1):
        tokens = rng.integers(0, VOCABULARY, (1, 1 if step else prompt))
        mask = np.ones((1, prompt + step), np.int64)
        logits: dict[str, Array] = {}
        for name, run in both.items():
            start = time.perf_counter()
            results = run({"tokens": tokens, "mask": mask, **caches[name]})
            times[name].append(time.perf_counter() - start)
            logits[name] = np.array(results["logits"])
            caches[name] = {
                key.replace("present", "past"): np.array(value)
                for key, value in results.items()
                if key != "logits"
            }
        one, other = [*logits.values(), *logits.values()][:2]
        # Rounding to int8 may differ by a step where a float32 is next to a tie.
        assert np.abs(one - other).max() <= 0.05 * np.abs(other).max(), step
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("layers", 4), ("width", 512), ("prompt", 20), ("steps", 100)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--level", type=int, default=4, help="accuracy_level of MatMulNBits")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=["subgraph", "onnxruntime"], help="one runtime")
    parser.add_argument("--save", type=Path, help="write the model, too")
    given = parser.parse_args()
    decoder = Decoder(given.layers, given.width, given.level)
    model = decoder.model()
    if given.save:
        onnx.save(model, given.save)
    both = runners(model, given.threads)
    chosen = {name: run for name, run in both.items() if given.only in (None, name)}
    times = generate(decoder, chosen, given.prompt, given.steps)
    table = Table(title=f"{given.layers} layers of {given.width}, {given.threads} thread(s), ms")
    for title in ("runtime", f"prompt of {given.prompt}", f"first {_FIRST} steps", "later steps"):
        table.add_column(title, justify="left" if title == "runtime" else "right")
    for name, (first, *rest) in times.items():
        row = [first, sum(rest[:_FIRST]), float(np.median(rest[_FIRST:] or rest))]
        table.add_row(name, *(f"{1e3 * seconds:.2f}" for seconds in row))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()

"""Time of the steps of a language model, with weights of 4 bits or from a file, beside peers.

usage: python benchmarks/decoder.py [--layers 4] [--width 512] [--prompt 20] [--steps 100]
       [--level 4] [--threads 1] [--only states] [--save decoder.onnx]
       python benchmarks/decoder.py --model FILE [--prompt 20] [--steps 100] ...

A file, as `make_models/export_decoders.py` writes it, has inputs ``input_ids``, ``attention_mask``,
``position_ids`` and ``past.*``, and outputs ``logits`` and ``present.*``. Without one the model has
the form that exporters of ONNX Runtime write: MatMulNBits, GroupQueryAttention with rotary
embeddings, normalization of root mean squares. Weights are random.

Steps of all runtimes alternate; each feeds its own results back, or, "states", has a request that
carries the cache from step to step. OpenVINO carries the cache as well, in float32. The table has
the time of the prompt, of the first steps, and the median of the later ones. With several threads,
and for caches of many megabytes, a process should have one runtime (``--only``), which no other
disturbs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
_STATES = "states"  # Subgraph with a request that carries the cache
_OPENVINO = "openvino"
_FIRST = 8  # steps that plan, bind or allocate
Runner = Callable[[Mapping[str, Array]], Mapping[str, Array]]
Made = Callable[[Array, int], dict[str, Array]]


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

    def inputs(self, tokens: Array, length: int) -> dict[str, Array]:
        """Return the inputs beside the cache.

        Args:
            tokens: The new tokens [1, count].
            length: Tokens before them and they.
        """
        return {"tokens": tokens, "mask": np.ones((1, length), np.int64)}


def inputs_of_file(tokens: Array, length: int) -> dict[str, Array]:
    """Return the inputs beside the cache of a model as `transformers` has it; see `Decoder`."""
    positions = np.arange(length - tokens.shape[1], length)[None]
    mask = np.ones((1, length), np.int64)
    return {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}


def empty_cache(model: onnx.ModelProto) -> dict[str, Array]:
    """Return a cache without positions."""
    found: dict[str, Array] = {}
    for value in model.graph.input:
        if value.name.startswith("past."):
            sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            found[value.name] = np.zeros((1, sizes[1], 0, sizes[3]), np.float32)
    return found


def by_subgraph(model: onnx.ModelProto, threads: int, *, states: bool) -> Runner:
    """Return a function that runs the model on Subgraph.

    Args:
        model: The model.
        threads: Threads of the runtime.
        states: Whether the request carries the cache.
    """
    compiled = sg.compile_model(sg.load(model), "CPU", {"INFERENCE_NUM_THREADS": threads})
    return compiled.create_infer_request(states).infer


def by_onnxruntime(model: onnx.ModelProto, threads: int) -> Runner:
    """Return a function that runs the model on ONNX Runtime."""
    session = onnxruntime_session(model.SerializeToString(), threads)
    names = [value.name for value in session.get_outputs()]

    def run(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        results: Any = session.run(None, dict(inputs))
        return dict(zip(names, results, strict=True))

    return run


def by_openvino(model: onnx.ModelProto, threads: int) -> Runner:
    """Return a function that runs the model on OpenVINO, which carries the cache.

    Args:
        model: The model.
        threads: Threads of the runtime.
    """
    import openvino
    from openvino._offline_transformations import apply_make_stateful_transformation

    core = openvino.Core()
    read: Any = core.read_model(model.SerializeToString())
    pairs = {name: name.replace("past", "present", 1) for name in empty_cache(model)}
    shapes = {each.any_name: each.partial_shape for each in read.inputs}
    for shape in shapes.values():
        shape[0] = 1  # otherwise the first states have no samples
    read.reshape(shapes)
    apply_make_stateful_transformation(read, pairs)
    options = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    request: Any = core.compile_model(read, "CPU", options).create_infer_request()

    def run(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        results = request.infer(dict(inputs))
        return {each.any_name: array for each, array in results.items()}

    return run


def generate(
    inputs_of: Made, empty: dict[str, Array], runners: Mapping[str, Runner], counts: Sequence[int]
) -> dict[str, list[float]]:
    """Return the seconds of each step, by runtime.

    Args:
        inputs_of: Returns the inputs beside the cache; see `Decoder.inputs`.
        empty: The cache to begin with.
        runners: The runtimes.
        counts: Tokens of each step: those of the prompt, then 1.
    """
    rng = np.random.default_rng(1)
    caches = {name: {} if name in (_STATES, _OPENVINO) else empty for name in runners}
    times: dict[str, list[float]] = {name: [] for name in runners}
    for step, count in enumerate(counts):
        tokens = rng.integers(0, VOCABULARY, (1, count))
        inputs = inputs_of(tokens, sum(counts[: step + 1]))
        logits: dict[str, Array] = {}
        for name, run in runners.items():
            start = time.perf_counter()
            results = run({**inputs, **caches[name]})
            times[name].append(time.perf_counter() - start)
            logits[name] = np.array(results["logits"])
            caches[name] = {
                key.replace("present", "past"): np.array(value)
                for key, value in results.items()
                if key != "logits"
            }
        one, *others = logits.values()
        # Rounding to int8 may differ by a step where a float32 is next to a tie.
        assert all(np.abs(one - o).max() <= 0.05 * np.abs(o).max() for o in others), step
    return times


RUNTIMES: dict[str, Callable[[onnx.ModelProto, int], Runner]] = {
    "subgraph": partial(by_subgraph, states=False),
    _STATES: partial(by_subgraph, states=True),
    "onnxruntime": by_onnxruntime,
    _OPENVINO: by_openvino,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("layers", 4), ("width", 512), ("prompt", 20), ("steps", 100)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--level", type=int, default=4, help="accuracy_level of MatMulNBits")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=list(RUNTIMES), help="one runtime")
    parser.add_argument("--save", type=Path, help="write the model, too")
    parser.add_argument("--model", type=Path, help="a file, instead of a model of random weights")
    given = parser.parse_args()
    decoder = Decoder(given.layers, given.width, given.level)
    model = onnx.load(given.model) if given.model else decoder.model()
    inputs_of = inputs_of_file if given.model else decoder.inputs
    title = given.model.name if given.model else f"{given.layers} layers of {given.width}"
    if given.save:
        onnx.save(model, given.save)
    names = [given.only] if given.only else list(RUNTIMES)
    chosen = {name: RUNTIMES[name](model, given.threads) for name in names}
    counts = [given.prompt, *[1] * given.steps]
    times = generate(inputs_of, empty_cache(model), chosen, counts)
    table = Table(title=f"{title}, {given.threads} thread(s), ms")
    for title in ("runtime", f"prompt of {given.prompt}", f"first {_FIRST} steps", "later steps"):
        table.add_column(title, justify="left" if title == "runtime" else "right")
    for name, (first, *rest) in times.items():
        row = [first, sum(rest[:_FIRST]), float(np.median(rest[_FIRST:] or rest))]
        table.add_row(name, *(f"{1e3 * seconds:.2f}" for seconds in row))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()

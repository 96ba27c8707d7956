"""Target: modified exported models, imported and run.

An input chooses a model and the changes of its file. Half of the inputs damage bytes; the others
change entries of the header, with sizes that agree with the body, and write the file with valid
checksums, as an attacker without the user's key could.
"""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest.mock import patch

import attrs
import numpy as np
import onnx
from robustness import damaged_bytes, damaged_message

import subgraph as sg
from subgraph import ops
from subgraph.devices import blob
from subgraph.graph.types import numpy_dtype
from subgraph.system import signing

from .draw import Draw, any_leaf
from .models import mutate as mutated_model
from .outcome import refuses


@attrs.frozen
class Exported:
    """An unmodified file.

    Attributes:
        data: The bytes of the file.
        header: Its header.
        body: Its body.
        inputs: Valid inputs of the model.
    """

    data: bytes
    header: dict[str, Any]
    body: bytes
    inputs: list[Any]


def _graphs() -> Iterator[tuple[sg.Graph, list[Any]]]:
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> Any:
        return rng.uniform(-1, 1, shape).astype(np.float32)

    x = sg.input("x", ("N", 3, 8, 8))
    y = ops.Relu(ops.Conv(x, weight(20, 3, 3, 3), weight(20), pads=[1, 1, 1, 1]))
    y = ops.BatchNormalization(y, weight(20), weight(20), weight(20), abs(weight(20)))
    y = ops.Softmax(ops.Gemm(ops.Flatten(ops.MaxPool(y, kernel_shape=[2, 2])), weight(980, 10)))
    yield sg.Graph([x], [y], "convolution"), [weight(2, 3, 8, 8)]
    x = sg.input("x", ("N", "T", 16))
    y = ops.LayerNormalization(ops.Add(ops.MatMul(x, weight(16, 16)), x), weight(16), weight(16))
    y = ops.Gelu(ops.MatMul(y, weight(16, 48)))
    yield sg.Graph([x], [ops.ReduceMean(y, [1])], "transformer"), [weight(2, 5, 16)]
    x = sg.input("x", (4, "N", 6))
    y, *_ = ops.LSTM(x, weight(1, 32, 6), weight(1, 32, 8), weight(1, 64), hidden_size=8)
    yield sg.Graph([x], [y], "recurrent"), [weight(4, 2, 6)]
    x, i = sg.input("x", ("N", 8)), sg.input("i", ("K",), "int64")
    y = ops.Gather(ops.MatMul(x, weight(8, 8)), i, axis=0)
    yield (
        sg.Graph([x, i], [ops.Concat(y, ops.Tanh(y), axis=1)], "lookup"),
        [weight(5, 8), np.arange(4)],
    )


@cache
def _exported() -> list[Exported]:
    found: list[Exported] = []
    for graph, inputs in _graphs():
        for device in ("CPU", "HETERO:CPU,REFERENCE", "REFERENCE"):
            model = sg.compile_model(graph, device)
            model(inputs)
            stream = io.BytesIO()
            model.export_model(stream)
            reader = blob.BlobReader(io.BytesIO(stream.getvalue()))
            body = bytes(reader._body)  # pyright: ignore[reportPrivateUsage]  # with all padding
            found.append(Exported(stream.getvalue(), reader.header, body, inputs))
    return found


def seeds() -> Iterator[bytes]:
    """Yield inputs for every file and every kind of change."""
    rng = random.Random(0)
    for number in range(len(_exported())):
        for kind in range(0, 256, 16):
            yield bytes([number, kind]) + rng.randbytes(24)


def run(data: bytes) -> None:
    """Change a file, import it and run the model."""
    draw = Draw(data)
    chosen = draw.choice(_exported())
    content = _damaged(chosen, draw) if draw.often(0.5) else _forged(chosen, draw)
    models: list[sg.CompiledModel] = []
    device = draw.choice(("CPU", "CPU", "REFERENCE", "HETERO:CPU,REFERENCE"))
    core = sg.Core()
    if not refuses(lambda: models.append(core.import_model(io.BytesIO(content), device))):
        model = models[0]
        for _ in range(2):
            refuses(lambda: model(chosen.inputs))


def _damaged(chosen: Exported, draw: Draw) -> bytes:
    data = bytearray(chosen.data)
    if draw.often(0.5):  # in the header or near it
        at = draw.below(min(len(data), 1 << 14))
        data[at] = draw.byte()
        return bytes(data)
    return damaged_bytes(chosen.data, draw.rng())


def _forged(chosen: Exported, draw: Draw) -> bytes:
    header, body = _copied(chosen.header), bytearray(chosen.body)
    for _ in range(1 + draw.below(3)):
        match draw.below(5):
            case 0:
                _change_leaf(header, draw)
            case 1:
                body = _change_model(header, body, draw)
            case 2:
                body = _resize_part(header, body, draw)
            case 3:
                _swap_parts(header, draw)
            case _:
                for _ in range(1 + draw.below(8) if body else 0):
                    body[draw.below(len(body))] = draw.byte()
    writer = blob.BlobWriter()
    writer.add(bytes(body))
    stream = io.BytesIO()
    with patch.object(signing, "_key", lambda: b"somebody else's"):
        writer.write(header, stream)
    return stream.getvalue()


def _copied(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return [_copied(value) for value in tree] if isinstance(tree, list) else tree


def _change_leaf(header: dict[str, Any], draw: Draw) -> None:
    found = any_leaf(header, draw)
    if found is None:
        return
    tree, key = found
    match draw.below(6):
        case 0 | 1:
            tree[key] = draw.number()
        case 2:
            other = any_leaf(header, draw)
            tree[key] = _copied(other[0][other[1]]) if other else None
        case 3:
            tree[key] = draw.choice(
                ("", "/etc/passwd", "../x", "float32", "int4", "CPU", None, [], {})
            )
        case 4 if isinstance(tree[key], int):
            tree[key] += draw.choice((-1, 1, 8, 64, -64))
        case _:
            del tree[key]


def _parts(tree: Any) -> list[dict[str, Any]]:
    """Return the header's entries that describe an array in the body."""
    if isinstance(tree, list):
        return [part for item in tree for part in _parts(item)]
    if not isinstance(tree, dict):
        return []
    own = [tree] if {"dtype", "shape", "place"} <= set(tree) else []
    return own + [part for key in sorted(tree) for part in _parts(tree[key])]


def _resize_part(header: dict[str, Any], body: bytearray, draw: Draw) -> bytearray:
    """Give a stored array another shape, and new bytes of that size at the end of the body."""
    parts = _parts(header)
    if not parts:
        return body
    part = draw.choice(parts)
    stored = part["shape"] if isinstance(part["shape"], list) else []
    shape = [size for size in stored if isinstance(size, int)]  # an earlier change may add others
    if shape and draw.often(0.7):
        shape[draw.below(len(shape))] = draw.choice((0, 1, 2, 3, 8, 16, 17, 64))
    elif draw.often(0.5):
        shape = shape[1:]
    else:
        shape = [*shape, 1]
    try:
        size = int(np.prod(shape)) * numpy_dtype(part["dtype"]).itemsize
    except (sg.SubgraphError, TypeError):
        return body  # an earlier change has made the entry invalid
    if not 0 <= size <= 1 << 20:
        return body
    body += bytes(-len(body) % 64)
    part["shape"], part["place"] = shape, {"offset": len(body), "size": size}
    fill = draw.rng().randbytes(64) or bytes(64)
    body += (fill * (size // 64 + 1))[:size]
    return body


def _swap_parts(header: dict[str, Any], draw: Draw) -> None:
    """Exchange two descriptions of stored arrays."""
    parts = _parts(header)
    if parts:
        one, other = draw.choice(parts), draw.choice(parts)
        first, second = dict(one), dict(other)
        one.update(second)
        other.update(first)


def _change_model(header: dict[str, Any], body: bytearray, draw: Draw) -> bytearray:
    """Replace the graph of the file by a damaged one, or one with a weight of another shape."""
    place = header.get("model")
    if not isinstance(place, dict) or not {"offset", "size"} <= set(place):
        return body
    try:
        begin = int(place["offset"])
        old = onnx.ModelProto.FromString(bytes(body[begin : begin + int(place["size"])]))
    except Exception:
        return body  # an earlier change has made the entry invalid
    if draw.often(0.4):
        new = damaged_message(old, draw.rng())
    elif draw.often(0.5) and old.graph.initializer:
        tensor = old.graph.initializer[draw.below(len(old.graph.initializer))]
        weight = (
            header["weights"].get(tensor.name) if isinstance(header.get("weights"), dict) else None
        )
        if tensor.dims:
            tensor.dims[draw.below(len(tensor.dims))] = draw.choice((0, 1, 2, 3, 8, 17))
        if isinstance(weight, dict):
            weight["size"] = 4 * int(np.prod(tensor.dims))
        new = old.SerializeToString()
    else:
        new = mutated_model(old.SerializeToString(), 1 << 16, draw.below(1 << 16))
    body += bytes(-len(body) % 64)
    header["model"] = {"offset": len(body), "size": len(new)}
    body += new
    return body

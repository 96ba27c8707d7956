"""Reading and writing of ONNX files: ``sg.load``, ``sg.save``, ``sg.to_onnx``.

`load` maps the file, leaves the bytes of large tensors in it (`subgraph.onnx_format.wire`), parses
the rest with the onnx package and converts the message (`subgraph.onnx_format.reader`); weights
become views of the mapped file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from subgraph.dtypes import NOT_RAW
from subgraph.errors import (
    InternalError,
    LimitError,
    ModelError,
    SubgraphError,
    file_error,
    require_type,
)
from subgraph.graph.graph import Graph
from subgraph.graph.limits import limited, parse_bytes
from subgraph.system.gc_control import paused_gc
from subgraph.system.trusted_files import AtomicFiles

if TYPE_CHECKING:
    import onnx

    from subgraph.graph.types import Array
    from subgraph.onnx_format.reader import Functions
    from subgraph.onnx_format.tensors import TensorReader
    from subgraph.onnx_format.wire import Buffer

# Smaller tensors stay in the model's file when weights go to a data file. An estimate.
_EXTERNAL_MIN_BYTES = 1024
# Protobuf's limit of 2 GiB, less 1 MiB for everything but weights.
_MESSAGE_MAX_BYTES = (1 << 31) - (1 << 20)
# Alignment of weights in a data file, in bytes, so that kernels can use them where they are mapped:
# a cache line; for weights from 1 MiB on, a page.
_ALIGN, _ALIGN_LARGE, _LARGE_BYTES = 64, 4096, 1 << 20
# Field numbers in onnx.proto: ModelProto.graph, GraphProto.initializer.
_GRAPH, _INITIALIZER = 7, 5


def load(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto | IO[bytes],
    *,
    functions: Functions = "inline",
    folder: str | os.PathLike[str] | None = None,
    mapped: bool = True,
    infer_types: bool = True,
    memory_limit: int | str = 0,
    node_limit: int = 0,
    timeout: float = 0.0,
) -> Graph:
    """Return the graph of an ONNX model.

    The weights of a file are mapped into memory and read when they are first used. The file must
    not be truncated while the graph is in use; `save` to the same path is safe, since it creates a
    new file.

    Args:
        model: Path, serialized model, ModelProto, or a file open for reading bytes.
        functions: Whether calls of model-local functions are replaced by their bodies ("inline")
            or become subgraph nodes ("keep"). Subgraph nodes that `save` wrote always become
            subgraph nodes; their properties make their ops again. If a property is not registered,
            the region gets the default op, and a logged warning names the property.
        folder: Where external data are; by default the folder of the model's path.
        mapped: False reads the weights into memory at once.
        infer_types: Whether to fill in types of values that the file does not state.
        memory_limit: Bytes that tensors may take besides the mapped file, such as "8G"; 0:
            ``SUBGRAPH_MEMORY_LIMIT``, else half of the machine's memory.
        node_limit: Nodes that expanding functions may add; 0: 262,144.
        timeout: Seconds that loading may take; 0: no limit.

    Raises:
        ModelError: the model is damaged, incomplete or not well formed.
        UnsupportedOpError: it uses an operator or opset that is not known.
        LimitError: it asks for more than the limits.
        MemoryError: there is not enough memory for it.
        InternalError: Subgraph failed on a model that `onnx.checker` passes.
    """
    place = None if folder is None else Path(folder)
    memory = parse_bytes(str(memory_limit or ""), "memory_limit")
    with limited(memory, node_limit, timeout):
        return _checked(
            lambda: _load(model, functions, place, mapped), model, _shown(model), infer_types
        )


def load_message(model: onnx.ModelProto, tensors: TensorReader) -> Graph:
    """Return the graph of a message whose external tensors are found by ``tensors``: see `load`.

    Args:
        model: The message.
        tensors: Reads the arrays of its tensors.
    """
    from subgraph.onnx_format.reader import GraphReader

    return _checked(lambda: GraphReader(model, tensors, "inline").read(), model, "model", True)


def _checked(read: Callable[[], Graph], model: Any, source: str, infer_types: bool) -> Graph:
    """Call ``read`` and infer the types of its graph; every error names ``source``."""
    from subgraph.partition.restore import restore_ops

    try:
        with paused_gc():
            graph = read()
            if infer_types:
                from subgraph.operators.type_inference import infer_graph

                # Types come before ops: a property may compile by the types of its region.
                infer_graph(graph, strict=False)
            restore_ops(graph)
            if any(node.op_type == "Gradient" for node in graph.nodes):
                from subgraph.transform.pass_manager import apply_pass

                # A Gradient names values of this file, so it has to be expanded here.
                graph = apply_pass(graph, "ExpandGradient")
            return graph
    except SubgraphError as error:
        named = isinstance(error, (LimitError, ModelError, NotImplementedError))
        if named and repr(source) not in str(error):
            raise type(error)(f"{source}: {error}") from error
        raise
    except RecursionError as error:
        raise ModelError(f"{source}: bodies or functions are nested too deeply") from error
    except MemoryError:  # the machine's memory, not a defect of the model
        raise
    except Exception as error:
        raise _unforeseen(model, source, error) from error


def _unforeseen(model: Any, source: str, error: Exception) -> SubgraphError:
    """Return the error for an unexpected exception.

    It is a ModelError if `onnx.checker` refuses the model, else an InternalError.
    """
    import onnx

    kind = type(error).__name__
    try:
        onnx.checker.check_model(model, full_check=True)  # pyright: ignore[reportUnknownMemberType]
    except Exception:
        return ModelError(f"{source}: not an ONNX model, or damaged: {kind}: {error}")
    return InternalError(
        f"{source}: Subgraph failed on a model that onnx.checker passes: {kind}: {error}; please "
        "report it with the model"
    )


def _shown(model: Any) -> str:
    if isinstance(model, (str, os.PathLike)):
        path: str = os.fspath(model)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        return path
    name = getattr(model, "name", None)
    return name if isinstance(name, str) and name else f"model ({type(model).__name__})"


def _load(model: Any, functions: Functions, folder: Path | None, mapped: bool) -> Graph:
    from subgraph.onnx_format.reader import GraphReader
    from subgraph.onnx_format.tensors import TensorReader, map_file
    from subgraph.onnx_format.wire import strip
    from subgraph.operators.messages import ModelProto

    if functions not in ("inline", "keep"):
        raise ModelError(f"functions is {functions!r}; it is 'inline' or 'keep'")
    if isinstance(model, ModelProto):
        return GraphReader(model, TensorReader(folder), functions).read()
    buffer: Buffer
    if isinstance(model, (str, os.PathLike)):
        path: Path = Path(model)  # pyright: ignore[reportUnknownArgumentType]
        buffer, folder = map_file(path), folder or path.parent
    elif isinstance(model, (bytes, bytearray, memoryview)):
        buffer = bytes(cast("bytes", model))
    elif hasattr(model, "read"):
        buffer = model.read()
        if not isinstance(buffer, bytes):
            raise ModelError("the file is open for text; open it for bytes ('rb')")
        name = getattr(model, "name", None)
        if folder is None and isinstance(name, str):
            folder = Path(name).parent
    else:
        raise ModelError(
            f"cannot load a {type(model).__name__}; give a path, bytes, a ModelProto or a file"
        )
    if buffer[:8] == b"\x89SUBGRPH":  # `subgraph.devices.blob.MAGIC`, of a folder above
        raise ModelError(
            "an exported model, not an ONNX one; core.import_model and `subgraph run` read it"
        )
    # A checkout without git-lfs has such a text instead of the model. Protobuf would call it
    # damaged.
    if buffer[:24] == b"version https://git-lfs.":
        raise ModelError("a pointer of git-lfs, not the model itself; run git lfs pull")
    key = os.urandom(8).hex()
    small, spans = strip(buffer, key)
    proto = ModelProto.FromString(small)
    # The message has its own copy of these bytes, which are most of the file if weights are small.
    del small
    tensors = TensorReader(folder, buffer=buffer, key=key, spans=spans, mapped=mapped)
    return GraphReader(proto, tensors, functions).read()


def to_onnx(graph: Graph, *, inline: bool = False) -> onnx.ModelProto:
    """Return ONNX's message for a graph; each subgraph node becomes a model-local function.

    Args:
        graph: The graph.
        inline: As for `save`.

    Raises:
        ModelError: the graph has no form in ONNX, or is over 2 GB (use `save`).
    """
    _check_graph(graph)
    from subgraph.operators.protobuf import tensor_to_proto

    model, weights = _convert(graph, inline)
    if sum(array.nbytes for _, array in weights) > _MESSAGE_MAX_BYTES:
        raise ModelError(f"graph {graph.name!r} is over 2 GB, too large for one message: use save")
    model.graph.initializer.extend(tensor_to_proto(array, name) for name, array in weights)
    return model


def _check_graph(graph: object) -> None:
    if not isinstance(graph, Graph):
        raise ModelError(
            f"{type(graph).__name__} is no sg.Graph; sg.load makes one of a model, and a compiled "
            "model has its own in the attribute graph"
        )


def save(
    graph: Graph,
    path: str | os.PathLike[str],
    *,
    external_data: bool | None = None,
    inline: bool = False,
) -> None:
    """Write a graph as an ONNX file; each subgraph node becomes a model-local function.

    The file contains the decisions of partitions: names and reasons for `explain`, and name,
    version and options of the properties, with which `load` makes the ops again. It is written
    atomically: under a temporary name, then renamed.

    Args:
        graph: The graph.
        path: The file.
        external_data: Whether weights are written to a data file, ``<path>.data``; None: if the
            model has over 2 GB.
        inline: Whether to write the model without its partition, for readers that do not support
            model-local functions.

    Raises:
        ModelError: the graph has no form in ONNX, is over 2 GB without external data, or the file
            cannot be written.
    """
    target = _target(path)
    _check_graph(graph)
    with paused_gc():
        model, weights = _convert(graph, inline)
    total = model.ByteSize() + sum(array.nbytes for _, array in weights)
    if external_data is None:
        external_data = total > _MESSAGE_MAX_BYTES
    elif not external_data and total > _MESSAGE_MAX_BYTES:
        raise ModelError(
            f"graph {graph.name!r} has {total} bytes; an ONNX file holds 2 GB: use external_data"
        )
    try:
        with AtomicFiles() as files:
            if external_data:
                weights = _write_external(model, weights, files, target)
            _write_model(model, weights, files.open(target))
    except OSError as error:
        raise file_error("write", target, error) from error


def _target(path: str | os.PathLike[str]) -> Path:
    """Return the path of the file to write, with links resolved.

    Raises:
        ModelError: the path is empty, or names a folder, device or pipe.
    """
    require_type(path, (str, os.PathLike), ModelError, "the path of a file")
    if not os.fspath(path):
        raise ModelError("cannot write '': the path is empty; give a file's name")
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        kind = "a folder" if target.is_dir() else "no regular file"
        raise ModelError(f"cannot write {os.fspath(path)!r}: it is {kind}; give a file's name")
    return target


def _convert(graph: Graph, inline: bool) -> tuple[onnx.ModelProto, list[tuple[str, Array]]]:
    from subgraph.onnx_format.writer import GraphWriter

    if inline:
        from subgraph.partition.regions import inline_subgraphs

        graph = inline_subgraphs(graph)
    if any(value.type is None for value in (*graph.inputs, *graph.outputs)):
        from subgraph.operators.type_inference import infer_graph

        # ONNX requires types of inputs and outputs in the file. The caller's graph stays as it is.
        graph = graph.clone()
        infer_graph(graph, strict=False)
    writer = GraphWriter(graph)
    return writer.model(), writer.weights


def _write_external(
    model: onnx.ModelProto, weights: list[tuple[str, Array]], files: AtomicFiles, target: Path
) -> list[tuple[str, Array]]:
    """Write large weights to the data file; return those that stay in the model."""
    from subgraph.onnx_format.writer import add_external

    data_path = target.with_name(target.name + ".data")
    data = files.open(data_path)
    left: list[tuple[str, Array]] = []
    for name, array in weights:
        raw = _raw(array)
        if raw is None or len(raw) < _EXTERNAL_MIN_BYTES:
            left.append((name, array))
            continue
        align = _ALIGN_LARGE if len(raw) >= _LARGE_BYTES else _ALIGN
        data.write(bytes(-data.tell() % align))
        place = {"location": data_path.name, "offset": data.tell(), "length": len(raw)}
        add_external(model, name, array, **place)
        data.write(raw)
    return left


def _write_model(model: onnx.ModelProto, weights: list[tuple[str, Array]], file: IO[bytes]) -> None:
    """Write the model in pieces of the wire format, without copying weights into a message."""
    import onnx

    from subgraph.graph.types import ONNX_DTYPE, dtype_of
    from subgraph.onnx_format.wire import RAW_DATA, delimited
    from subgraph.operators.protobuf import tensor_to_proto

    large: list[tuple[bytes, memoryview]] = []
    for name, array in weights:
        raw = _raw(array)
        if raw is None or len(raw) < _EXTERNAL_MIN_BYTES:
            model.graph.initializer.append(tensor_to_proto(array, name))
            continue
        tensor = onnx.TensorProto(
            name=name, data_type=ONNX_DTYPE[dtype_of(array)], dims=array.shape
        )
        large.append((tensor.SerializeToString() + delimited(RAW_DATA, len(raw)), raw))
    # Protobuf allows the fields of a message in any order and lets a repeated field continue later,
    # so the large initializers follow the rest of the graph, and the graph the rest of the model.
    graph = model.graph.SerializeToString()
    model.ClearField("graph")
    pieces = [(delimited(_INITIALIZER, len(head) + len(raw)) + head, raw) for head, raw in large]
    file.write(model.SerializeToString())
    file.write(delimited(_GRAPH, len(graph) + sum(len(h) + len(raw) for h, raw in pieces)))
    file.write(graph)
    for head, raw in pieces:
        file.write(head)
        file.write(raw)


def _raw(array: Array) -> memoryview | None:
    """Return the bytes of an array as ``raw_data`` of ONNX; None if ONNX stores it otherwise."""
    import numpy as np

    from subgraph.graph.types import dtype_of

    # ONNX's raw data are little-endian, with elements below a byte packed.
    if dtype_of(array) in NOT_RAW or sys.byteorder == "big":
        return None
    flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memoryview(flat)

"""ONNX files in and out: ``sg.load``, ``sg.save``, ``sg.to_onnx``; the first step of a model's way.

A file is mapped, the bytes of its large tensors are left where they are (`subgraph.onnx_wire`), the
rest goes through the onnx parser and `subgraph.onnx_reader`; weights become views of the file.
"""

from __future__ import annotations

import gc
import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from subgraph.errors import ModelError, SubgraphError
from subgraph.graph import Graph

if TYPE_CHECKING:
    import onnx

    from subgraph.onnx_reader import Functions
    from subgraph.onnx_wire import Buffer

Source = "str | os.PathLike[str] | bytes | onnx.ModelProto | IO[bytes]"


def load(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto | IO[bytes],
    *,
    functions: Functions = "inline",
    folder: str | os.PathLike[str] | None = None,
    mapped: bool = True,
    infer_types: bool = True,
) -> Graph:
    """Return the graph of an ONNX model.

    Weights of a file stay in it and are mapped into memory; they are read when first used. The
    file must not be cut short while the graph lives (`save` over it is fine: it makes a new one).

    Args:
        model: Path, serialized model, ModelProto, or a file open for reading bytes.
        functions: Whether calls of model-local functions are replaced by their bodies ("inline")
            or become subgraph nodes ("keep"). Subgraph nodes that `save` wrote come back as such.
        folder: Where external data are; by default the folder of the model's path.
        mapped: False reads the weights into memory at once.
        infer_types: Whether to fill in types of values that the file does not state.

    Raises:
        ModelError: the model is damaged, incomplete or not well formed.
        UnsupportedOpError: it uses an operator or opset that is not known.
    """
    from google.protobuf.message import DecodeError

    source = _shown(model)
    try:
        with paused_gc():
            graph = _load(model, functions, None if folder is None else Path(folder), mapped)
            if infer_types:
                from subgraph.type_inference import infer_graph

                infer_graph(graph, strict=False)
            return graph
    except SubgraphError as error:
        if isinstance(error, (ModelError, NotImplementedError)):
            raise type(error)(f"{source}: {error}") from error
        raise
    except RecursionError as error:
        raise ModelError(f"{source}: bodies or functions are nested too deeply") from error
    except (DecodeError, ValueError, OverflowError, MemoryError) as error:
        raise ModelError(f"{source}: not an ONNX model, or damaged: {error}") from error


def _shown(model: Any) -> str:
    if isinstance(model, (str, os.PathLike)):
        path: str = os.fspath(model)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        return path
    name = getattr(model, "name", None)
    return name if isinstance(name, str) and name else f"model ({type(model).__name__})"


def _load(model: Any, functions: Functions, folder: Path | None, mapped: bool) -> Graph:
    import onnx

    from subgraph.onnx_reader import GraphReader
    from subgraph.onnx_tensors import TensorReader, map_file
    from subgraph.onnx_wire import strip

    if functions not in ("inline", "keep"):
        raise ModelError(f"functions is {functions!r}; it is 'inline' or 'keep'")
    if isinstance(model, onnx.ModelProto):
        return GraphReader(model, TensorReader(folder), functions).read()
    buffer: Buffer
    if isinstance(model, (str, os.PathLike)):
        path: Path = Path(model)  # pyright: ignore[reportUnknownArgumentType]
        buffer, folder = map_file(path), folder or path.parent
    elif isinstance(model, (bytes, bytearray, memoryview)):
        buffer = bytes(model)
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
    key = secrets.token_hex(8)
    small, spans = strip(buffer, key)
    proto = onnx.ModelProto.FromString(small)
    del small
    tensors = TensorReader(folder, buffer=buffer, key=key, spans=spans, mapped=mapped)
    return GraphReader(proto, tensors, functions).read()


@contextmanager
def paused_gc() -> Generator[None]:
    """Keep the cyclic collector out while many objects are made, none of them garbage."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()

"""Inputs of the command line: models to compile or import, arrays from files or random ones."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import subgraph as sg
from subgraph.dtypes import DTYPES
from subgraph.errors import ConfigError, LimitError, MissingInputError, ModelError, ShapeError
from subgraph.graph.graph import Graph
from subgraph.graph.types import Array, TensorType, numpy_dtype
from subgraph.runtime.compiled_model import CompiledModel
from subgraph.runtime.signature import Port
from subgraph.system.registry import nearest
from subgraph.system.trusted_files import open_regular
from subgraph.visualization import ENDINGS


def assignment(text: str) -> tuple[str, str]:
    """Return name and value of a ``NAME=VALUE`` argument; argparse reports one of another form."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return name, value


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a converter for arguments that are whole numbers from ``least`` to ``most``."""
    wanted = f"of at least {least}" if most is None else f"from {least} to {most}"

    def convert(text: str) -> int:
        number = int(text) if text.removeprefix("-").isdecimal() else least - 1
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"expected a whole number {wanted}, got {text!r}")
        return number

    return convert


def positive(text: str) -> float:
    """Return the number of an argument, which must be above 0 and finite."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:  # not for a NaN either
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return number


def listed(text: str) -> list[str]:
    """Return the different names of an argument ``A,B``."""
    found = [name.strip() for name in text.split(",")]
    if "" in found:
        raise argparse.ArgumentTypeError(f"expected names separated by commas, got {text!r}")
    return list(dict.fromkeys(found))


def path(text: str) -> Path:
    """Return the path of an argument; pathlib takes an empty one for the present folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"expected a file or folder, got {text!r}")
    return Path(text)


def picture(text: str) -> Path:
    """Return the path of a picture, whose ending chooses its form."""
    target = path(text)
    if target.suffix.lower() not in ENDINGS:
        raise argparse.ArgumentTypeError(f"expected a file {', '.join(ENDINGS)}, got {text!r}")
    return target


def script(text: str) -> str:
    """Return the path of a Python file."""
    if path(text).is_dir():
        raise argparse.ArgumentTypeError(f"expected a Python file, got the folder {text!r}")
    return text


def compiled_model(args: argparse.Namespace) -> CompiledModel:
    """Return the compiled or imported model of ``model``, ``--device`` and ``--config``."""
    core = sg.default_core()
    config = dict(args.config)
    if args.model.suffix != ".onnx" and _is_exported(args.model):
        return core.import_model(args.model, args.device, config)
    return core.compile_model(args.model, args.device, config)


def _is_exported(path: Path) -> bool:
    from subgraph.devices.blob import MAGIC

    with open_regular(path) as file:
        return file.read(len(MAGIC)) == MAGIC


def ports(graph: Graph) -> list[Port]:
    """Return the inputs of a graph as ports, as of a compiled model."""
    return [Port(value.name, value.type, value.parameter) for value in graph.inputs]


def input_arrays(
    inputs: Sequence[Port],
    sources: Mapping[str, str],
    dims: Mapping[str, str],
    seed: int,
) -> dict[str, Any]:
    """Return an array for each input without default: from a file, or random.

    Args:
        inputs: Inputs of the model, with types and defaults.
        sources: Paths of files by name, or "random", as is an input without a source.
        dims: Sizes of symbolic dimensions by name, of unknown ones by ``INPUT.AXIS``; default: 1.
        seed: Seed of random arrays.

    Raises:
        MissingInputError: a source has the name of no input.
        ConfigError: a name in ``dims`` is no symbolic dimension, its size no whole number, or a
            source is empty.
        LimitError: a random array has more elements than NumPy allows.
        ModelError: a file cannot be read.
        ShapeError: the array of a file does not fit, or an input's rank is unknown.
    """
    sizes = _sizes(inputs, dims)
    names = [value.name for value in inputs]
    for name in sources:
        if name not in names:
            raise MissingInputError(f"the model has no input {name!r}; {nearest(name, names)}")
    rng = np.random.default_rng(seed)
    arrays: dict[str, Any] = {}
    for value in inputs:
        source = sources.get(value.name, "random")
        if not source:
            raise ConfigError(f"--input {value.name}= needs a .npy or .pb file, or random")
        if source != "random":
            arrays[value.name] = _fitting(read_array(Path(source)), value, source)
        elif value.default is None:
            try:
                arrays[value.name] = _random(value, sizes, rng)
            except (ValueError, OverflowError) as error:  # of NumPy, for sizes above its limits
                if isinstance(error, ShapeError):
                    raise
                raise LimitError(f"input {value.name!r} with sizes {sizes}: {error}") from error
    return arrays


def _sizes(inputs: Sequence[Port], dims: Mapping[str, str]) -> dict[str, int]:
    types = [value.type for value in inputs if isinstance(value.type, TensorType)]
    known = {dim for type_ in types for dim in type_.shape or () if isinstance(dim, str)}
    known |= {
        f"{value.name}.{axis}"
        for value in inputs
        if isinstance(value.type, TensorType)
        for axis, dim in enumerate(value.type.shape or ())
        if dim is None
    }
    for name, text in dims.items():
        if name not in known:
            raise ConfigError(
                f"--dim {name}={text}: the inputs have no symbolic dimension {name!r}; "
                f"{nearest(name, sorted(known)) if known else 'they have none at all'}"
            )
        if not text.isdecimal():
            raise ConfigError(f"--dim {name}={text}: the size must be a whole number from 0 on")
    return {name: int(text) for name, text in dims.items()}


def _fitting(array: Array, value: Port, source: str) -> Array:
    """Return an array of a file after a check against its input; the message names the file.

    Raises:
        ShapeError: its dtype or dimensions do not fit.
    """
    if isinstance(value.type, TensorType) and array.dtype.kind not in "OUS":
        got = TensorType(array.dtype, array.shape)
        dims = value.type.shape
        wrong = dims is not None and (
            len(dims) != array.ndim
            or any(
                isinstance(dim, int) and dim != size
                for dim, size in zip(dims, array.shape, strict=True)
            )
        )
        if got.dtype != value.type.dtype or wrong:
            raise ShapeError(f"{source}: input {value.name!r} is {value.type}, the file has {got}")
    return array


def read_array(path: Path) -> Array:
    """Read an array from a NumPy file, or from a file with one ONNX TensorProto.

    Raises:
        ModelError: the file is neither.
        OSError: the file cannot be opened.
    """
    try:
        if path.suffix == ".pb":
            import onnx

            from subgraph.operators.protobuf import tensor_from_proto

            proto = onnx.TensorProto()
            with open_regular(path) as file:
                proto.ParseFromString(file.read())
            return tensor_from_proto(proto)
        with open_regular(path) as file:
            array: Array = np.lib.format.read_array(file)
        return array
    except OSError:
        raise
    except Exception as error:
        raise ModelError(
            f"{path}: cannot be read as an array ({error}); give a .npy file, or a .pb file with "
            "one TensorProto"
        ) from error


def _random(value: Port, sizes: Mapping[str, int], rng: np.random.Generator) -> Any:
    type_ = value.type
    if not isinstance(type_, TensorType) or type_.shape is None:
        raise ShapeError(
            f"input {value.name!r} has type {type_ or 'unknown'}: no random array can be made; "
            f"give one with --input {value.name}=file.npy"
        )
    shape = [
        dim if isinstance(dim, int) else sizes.get(dim or f"{value.name}.{axis}", 1)
        for axis, dim in enumerate(type_.shape)
    ]
    dtype = numpy_dtype(type_.dtype)
    if type_.dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if type_.dtype == "string":
        return np.full(shape, "text", dtype=object)
    if DTYPES[type_.dtype].kind in ("int", "uint"):
        # 0 and 1, because integers are often indices or tokens.
        return rng.integers(0, 2, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)

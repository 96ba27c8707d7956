"""The commands that write models, `subgraph compile` and `reshape`, and files of results."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import subgraph as sg
from subgraph.errors import ConfigError, ModelError
from subgraph.graph.result_arrays import is_array, is_list
from subgraph.graph.types import Dim
from subgraph.operators.protobuf import tensor_to_proto
from subgraph.tools.cli_inputs import compiled_model
from subgraph.tools.cli_output import Output, Row

_MAX_NAME_BYTES = 200  # file systems take 255; a number and the ending follow


def compile_command(args: argparse.Namespace) -> None:
    """Compile a model and write it to one file, with which `subgraph run` starts faster."""
    out = Output(args)
    with out.progress("compiling"):
        model = compiled_model(args)
        model.export_model(args.output)
    facts: Row = {"file": str(args.output), "bytes": args.output.stat().st_size}
    out.facts(facts)
    out.finish(facts)


def reshape(args: argparse.Namespace) -> None:
    """Change the shapes of a model's inputs, also where the model holds sizes as constants."""
    out = Output(args)
    with out.progress("loading and changing shapes"):
        graph = sg.load(args.model)
        names = {value.name for value in graph.inputs}
        shapes = {name: _dims(t) if name in names else _number(t) for name, t in args.shape}
        batch = None if args.batch is None else _number(args.batch)
        reshaped = sg.reshape(graph, shapes, batch=batch)
        sg.save(reshaped, args.output)
    rows = [
        {"": kind, "name": new.name, "before": str(old.type), "now": str(new.type)}
        for kind, olds, news in (
            ("input", graph.inputs, reshaped.inputs),
            ("output", graph.outputs, reshaped.outputs),
        )
        for old, new in zip(olds, news, strict=True)
    ]
    out.table("shapes", rows)
    out.finish({"file": str(args.output), "rows": rows})


def _dims(text: str) -> list[Dim]:
    """Return the dimensions of a text such as ``N,3,224,?``."""
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    return [None if part == "?" else _number(part) for part in parts]


def _number(text: str) -> int | str:
    """Return a dimension.

    Raises:
        ConfigError: the text is neither a number that fits 64 bits nor a name.
    """
    # A negative number is an error of the shape. A file has 64 bits.
    if text.removeprefix("-").isdecimal() and len(text) < 19:
        return int(text)
    if not text[:1].isalpha() and not text.startswith("_"):
        raise ConfigError(
            f"dimension {text!r} is neither a whole number below 10**18, a name nor ?"
        )
    return text


def _file_names(names: Sequence[str]) -> list[str]:
    """Return distinct file names for outputs; a number follows a name that is taken.

    Names that differ only in case count as equal, because some file systems ignore case.
    """
    found: list[str] = []
    taken: set[str] = set()
    for name in names:
        plain = "".join(c if c.isalnum() or c in "._-" else "_" for c in name) or "output"
        plain = plain.encode()[:_MAX_NAME_BYTES].decode(errors="ignore")
        file, number = plain, 1
        while file.casefold() in taken:
            number += 1
            file = f"{plain}_{number}"
        taken.add(file.casefold())
        found.append(file)
    return found


def write_results(folder: Path, results: Mapping[str, Any]) -> list[str]:
    """Write each result as a .npy file, those of a sequence as one for each item.

    Arrays of a dtype that NumPy lacks, such as bfloat16, become .pb files with one TensorProto: a
    .npy file would hold bytes without their dtype.

    Args:
        folder: Folder of the files; it is created if it does not exist.
        results: Arrays, or lists of arrays, by name of the output.

    Returns:
        The path of each result's file; of a sequence with "*" for the positions of items.

    Raises:
        ModelError: a result is neither an array nor a list of arrays.
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[str] = []
    for file, (name, result) in zip(_file_names(list(results)), results.items(), strict=True):
        several = is_list(result)
        items: list[Any] = result if several else [result]
        ending = "pb" if any(map(_is_beyond_numpy, items)) else "npy"
        for position, item in enumerate(items):
            path = folder / (f"{file}.{position}.{ending}" if several else f"{file}.{ending}")
            _write_array(path, name, item)
        paths.append(str(folder / (f"{file}.*.{ending}" if several else f"{file}.{ending}")))
    return paths


def _is_beyond_numpy(item: Any) -> bool:
    """Return whether an item of a result is an array of a dtype that ml_dtypes has defined."""
    return is_array(item) and item.dtype.isbuiltin == 2


def _write_array(path: Path, name: str, array: Any) -> None:
    if not is_array(array):
        raise ModelError(f"output {name!r} has a {type(array).__name__}, which no .npy file holds")
    if path.suffix == ".pb":
        path.write_bytes(tensor_to_proto(array, name).SerializeToString())
        return
    # Strings are written with a fixed width, since Python objects would need pickle.
    np.save(path, array.astype(str) if array.dtype == object else array, allow_pickle=False)

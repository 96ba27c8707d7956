"""The commands that write models: `subgraph compile` and `subgraph reshape`."""

from __future__ import annotations

import argparse

import subgraph as sg
from subgraph.graph.types import Dim
from subgraph.tools.cli_inputs import compiled_model
from subgraph.tools.cli_output import Output, Row


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
    return int(text) if text.isdecimal() else text

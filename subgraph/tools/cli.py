"""The command ``subgraph``: run, partition, explain, query, compile and describe models.

It parses arguments, calls public functions, and shows their results as tables or as JSON. Exit
status: 0 done, 1 an error that Subgraph reports, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

import attrs
import numpy as np

import subgraph as sg
from subgraph.dtypes import DTYPES
from subgraph.graph.graph import Graph, Node
from subgraph.graph.types import Array, TensorType, dtype_of
from subgraph.operators.operator import operator_key
from subgraph.runtime.settings import describe_options
from subgraph.tools.cli_accuracy import accuracy
from subgraph.tools.cli_inputs import (
    assignment,
    compiled_model,
    input_arrays,
    listed,
    path,
    picture,
    positive,
    script,
    whole,
)
from subgraph.tools.cli_measure import bench, profile, warmup
from subgraph.tools.cli_output import (
    Output,
    Row,
    discard_output,
    how_to_show,
    op_name,
    prepare_streams,
    printable,
)
from subgraph.tools.cli_write import compile_command, reshape, write_results

# Adds a subcommand (name, function; the help is its docstring) and returns its parser.
AddCommand = Callable[[str, Callable[[argparse.Namespace], None]], Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (None: the process's arguments); return the exit status."""
    prepare_streams()
    args = _parser().parse_args(argv)
    try:
        for script in getattr(args, "imports", None) or ():
            runpy.run_path(script)
        args.command(args)
        sys.stdout.flush()
        return 0
    except BrokenPipeError:  # the reader of the output has closed it, as head does
        discard_output()
        return 0
    except KeyboardInterrupt:
        print("subgraph: interrupted", file=sys.stderr)
        return 130
    except sg.SubgraphError as error:
        message = str(error)
    except MemoryError as error:
        message = f"out of memory: {error}"
    except OSError as error:
        message = error.strerror or str(error)
        if error.filename is not None:
            message = f"{error.filename}: {message}"
    print(f"subgraph: error: {printable(message)}", file=sys.stderr)
    try:
        if args.json:
            print(json.dumps({"error": message}))
        sys.stdout.flush()
    except OSError:
        discard_output()
    return 1


# ---------------------------------------------------------------- commands


def run(args: argparse.Namespace) -> None:
    """Run a model on files or random inputs; print the results, or write them to a folder."""
    out = Output(args)
    with out.progress("loading and compiling"):
        model = compiled_model(args)
        arrays = input_arrays(model.inputs, dict(args.input), dict(args.dim), args.seed)
    times: list[float] = []
    results: Mapping[str, Any] = {}
    with out.progress("running"):
        for _ in range(args.repeat):
            start = time.perf_counter()
            results = model(arrays)
            times.append(time.perf_counter() - start)
    rows = [_describe(name, value) for name, value in results.items()]
    if args.output is not None:
        for row, file in zip(rows, write_results(args.output, results), strict=True):
            row["file"] = file
    # The first run includes planning for these shapes, so that the median leaves it out.
    summary: Row = {"runs": len(times), "first_ms": round(times[0] * 1e3, 3)}
    median = round(float(np.median(times[1:] or times)) * 1e3, 3)
    if len(times) > 1:
        summary["median_ms"] = median
    out.table("results", rows)
    out.facts(summary)
    out.finish({"results": rows, **summary, "median_ms": median})


def partition(args: argparse.Namespace) -> None:
    """Partition a model by a selector, property or list of operators; show the subgraphs."""
    out = Output(args)
    with out.progress("loading"):
        graph = sg.load(args.model)
    with out.progress("partitioning"):
        cut = _partitioned(graph, args)
    rows, facts = partition_rows(cut, graph)
    if args.output is not None:
        sg.save(cut, args.output)
    if args.picture is not None:
        sg.visualize(cut).save(args.picture)
    out.table("subgraphs", rows)
    out.facts(facts)
    outside = [node for node in cut.nodes if node.subgraph is None]
    reasons = [
        {"node": node.name, "operator": node.op_type, "why": _why(cut, node)}
        for node in outside[: args.reasons]
    ]
    if reasons:
        out.table("outside", reasons)
    if len(outside) > len(reasons):
        out.line(f"{len(outside) - len(reasons)} more outside (--reasons N shows more)")
    if args.picture is not None:
        out.line(f"wrote {args.picture}: {how_to_show(args.picture)}")
    if args.output is not None:
        out.line(f"wrote {args.output}")
    out.finish({**facts, "subgraphs": rows, "outside": reasons})


def explain(args: argparse.Namespace) -> None:
    """Explain why a node is in its subgraph, or in none."""
    out = Output(args)
    with out.progress("loading and partitioning"):
        cut = _partitioned(sg.load(args.model), args)
    found = sg.explain(cut, args.node)
    out.line(str(found))
    out.finish({**attrs.asdict(found), "explanation": str(found)})


def info(args: argparse.Namespace) -> None:
    """Describe a model: inputs, outputs, operators, weights, and nodes that each device takes."""
    out = Output(args)
    with out.progress("loading"):
        graph = sg.load(args.model)
    core = sg.default_core()
    ends = [
        {"kind": kind, "name": value.name, "type": str(value.type or "?")}
        for kind, values in (("input", graph.inputs), ("output", graph.outputs))
        for value in values
    ]
    facts: Row = {
        "name": graph.name,
        "nodes": len(graph.nodes),
        "parameters": len(graph.parameters),
        "parameter_bytes": sum(p.array.nbytes for p in graph.parameters.values()),
        "opsets": ", ".join(f"{d or 'ai.onnx'} {v}" for d, v in graph.opsets.items()),
    }
    takes: dict[str, dict[str, str]] = {}
    with out.progress("asking the devices"):
        for device in core.available_devices:
            base = device.partition(".")[0]
            if base not in takes and base != "REFERENCE":
                takes[base] = core.query_model(graph, device)
    count = Counter(op_name(node) for node in graph.nodes)
    shares: dict[str, Counter[str]] = {
        device: Counter(op_name(n) for n in graph.nodes if n.name in names)
        for device, names in takes.items()
    }
    rows = [
        {"operator": op, "nodes": n, **{d: f"{shares[d][op]}/{n}" for d in shares}}
        for op, n in sorted(count.items(), key=lambda item: (-item[1], item[0]))
    ]
    for device, names in takes.items():
        facts[f"share_{device}"] = round(len(names) / max(len(graph.nodes), 1), 4)
    out.facts(facts)
    out.table("inputs and outputs", ends)
    out.table("operators (nodes that each device takes)", rows)
    out.finish({**facts, "values": ends, "operators": rows})


def devices(args: argparse.Namespace) -> None:
    """List the devices of this machine.

    With --all also devices that use other libraries, installed or not; with --properties every
    option and metric.
    """
    out = Output(args)
    core = sg.default_core()
    available = core.available_devices
    rows: list[Row] = [
        {"device": name, "full name": core.get_property(name, "FULL_DEVICE_NAME")}
        for name in available
    ]
    out.table("devices", rows)
    failed: list[Row] = [{"device": d, "why not": why} for d, why in core.failed_devices.items()]
    out.table("devices that cannot start", failed)
    libraries: list[Row] = []
    if args.all:
        for found in sg.backends():
            state = found.problem or "ready"
            row = {"device": found.name, "library": found.title, "version": found.version}
            libraries.append({**row, "state": state})
        out.table("devices over other libraries", libraries)
    properties: list[Row] = []
    if args.properties:
        others = (n for n in core.registered_devices if n not in core.failed_devices)
        virtual = [name for name in others if core.device(name).is_virtual]
        for name in (*available, *virtual):
            properties += _properties(core, name)
        out.table("properties", properties)
    facts = {"devices": rows, "failed": failed, "properties": properties}
    out.finish({**facts, "libraries": libraries} if args.all else facts)


def _properties(core: sg.Core, device: str) -> list[Row]:
    """Return a row for each option and metric of a device."""
    options = describe_options(core.device(device).options_class)
    rows: list[Row] = []
    for key in core.get_property(device, "SUPPORTED_PROPERTIES"):
        if key == "SUPPORTED_PROPERTIES":
            continue
        allowed, about = options.get(key, ("read only", ""))
        value = _plain(core.get_property(device, key))
        row = {"device": device, "property": key, "value": value}
        rows.append({**row, "allowed": allowed, "about": about})
    return rows


def query(args: argparse.Namespace) -> None:
    """Show which device takes each node of a model, and the reasons of those that refuse it."""
    out = Output(args)
    with out.progress("loading and asking"):
        graph = sg.load(args.model)
        found = sg.default_core().query_model(graph, args.device, dict(args.config))
    if args.picture is not None:
        sg.visualize(graph, query=found).save(args.picture)
    rows = [
        {
            "node": node.name,
            "operator": op_name(node),
            "device": found.get(node.name, "-"),
            "why not": str(found.reasons.get(node.name, "")),
        }
        for node in graph.nodes
        if not args.refused or node.name not in found
    ]
    out.table(f"nodes on {args.device}", rows)
    taken = sum(node.name in found for node in graph.nodes)
    facts: Row = {"taken": taken, "nodes": len(graph.nodes)}
    out.facts(facts)
    if args.picture is not None:
        out.line(f"wrote {args.picture}: {how_to_show(args.picture)}")
    out.finish({"rows": rows, **facts})


# ---------------------------------------------------------------- shared steps


def _partitioned(graph: Graph, args: argparse.Namespace) -> Graph:
    options: dict[str, Any] = {}
    for key in ("strategy", "min_size", "max_subgraphs", "include", "exclude"):
        value = getattr(args, key)
        if value is not None:
            options[key] = value
    if args.property is not None:
        return sg.optimize_for(graph, args.property, **options)
    if args.selector is not None:
        graph = graph.clone()
        graph.attrs["subgraph_property"] = args.selector
        return sg.passes.apply_pass(graph, "PartitionGraph", **options)
    names = args.ops or [operator_key(node.op_type, node.domain) for node in graph.nodes]
    graph = graph.clone()
    graph.attrs["subgraph_property"] = sg.ContainOpSelector(names)
    return sg.passes.apply_pass(graph, "PartitionGraph", **options)


def partition_rows(cut: Graph, original: Graph) -> tuple[list[Row], Row]:
    """Return a row for each subgraph node of ``cut``, a partition of ``original``; and totals."""
    rows: list[Row] = []
    inside = 0
    for node in cut.nodes:
        if node.subgraph is None:
            continue
        inner = node.subgraph
        inside += len(inner.nodes)
        operators = Counter(op_name(n) for n in inner.nodes).most_common(6)
        weights = sum(value.parameter is not None for value in inner.inputs)
        rows.append(
            {
                "subgraph": node.name,
                "nodes": len(inner.nodes),
                "inputs": len(inner.inputs) - weights,
                "weights": weights,
                "outputs": len(inner.outputs),
                "operators": ", ".join(f"{n} {op}" for op, n in operators),
            }
        )
    total = len(original.nodes)
    facts: Row = {
        "number_of_subgraphs": len(rows),
        "nodes_inside": inside,
        "nodes_outside": sum(node.subgraph is None for node in cut.nodes),
        "share_inside": round(inside / max(total, 1), 4),
    }
    return rows, facts


def _describe(name: str, value: Any) -> Row:
    row: Row = {"name": name}
    if isinstance(value, np.ndarray):
        array = cast("Array", value)
        dtype = dtype_of(array)
        row["type"] = str(TensorType(dtype, array.shape))
        if array.size and DTYPES[dtype].kind in ("float", "int", "uint"):
            wide = array.astype(np.float64)
            row |= {
                "min": float(wide.min()),
                "mean": float(wide.mean()),
                "max": float(wide.max()),
            }
    else:
        row["type"] = type(value).__name__
    return row


def _why(cut: Graph, node: Node) -> str:
    return next(iter(sg.explain(cut, node).reasons), "")


def _plain(value: object) -> object:
    return value if isinstance(value, (int, float, str, bool)) or value is None else str(value)


# ---------------------------------------------------------------- arguments


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"subgraph: error: {message}\ntry: {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="subgraph", description="Bring your accelerator to any ONNX model.")
    parser.add_argument("--version", action="version", version=f"subgraph {sg.__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(name: str, function: Callable[[argparse.Namespace], None]) -> Any:
        text = (function.__doc__ or "").strip()
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=function)
        sub.add_argument("--json", action="store_true", help="print one JSON object")
        sub.add_argument(
            "--import",
            dest="imports",
            action="append",
            type=script,
            metavar="FILE.py",
            help="run this file first: it may register selectors, properties, devices, operators",
        )
        return sub

    _add_model_commands(command)
    _add_measuring_commands(command)
    return parser


def _add_model_commands(command: AddCommand) -> None:
    """Add the commands that run, partition, compile and describe models."""
    sub = command("run", run)
    _model(sub, exported=True)
    _device(sub)
    _inputs(sub)
    text = "run N times, and print the median time without the first run"
    sub.add_argument("--repeat", type=whole(1), default=1, metavar="N", help=text)
    sub.add_argument("--output", type=path, metavar="DIR", help="write each result as .npy, or .pb")

    sub = command("partition", partition)
    _model(sub)
    _cut(sub)
    sub.add_argument("-o", "--output", type=path, metavar="FILE", help="save the partitioned model")
    _picture(sub, "the regions, and why each node is in its region, or in none")
    text = "number of nodes outside of subgraphs to explain (default 20)"
    sub.add_argument("--reasons", type=whole(0), default=20, metavar="N", help=text)

    sub = command("explain", explain)
    _model(sub)
    sub.add_argument("node", help="the node's name")
    _cut(sub)

    _model(command("info", info))

    sub = command("devices", devices)
    sub.add_argument("--properties", action="store_true", help="list every property")
    text = "also devices that use other libraries, and how to install those"
    sub.add_argument("--all", action="store_true", help=text)

    sub = command("query", query)
    _model(sub)
    _device(sub)
    sub.add_argument("--refused", action="store_true", help="only nodes that it does not take")
    _picture(sub, "the device that takes each node, and the reasons of those that refuse it")

    text = "the file to write"
    sub = command("compile", compile_command)
    _model(sub)
    _device(sub)
    sub.add_argument("-o", "--output", type=path, required=True, metavar="FILE", help=text)

    sub = command("reshape", reshape)
    _model(sub)
    sub.add_argument("-o", "--output", type=path, required=True, metavar="FILE", help=text)
    text = "an input's shape (numbers, names, ?), such as x=N,3,224,224, or a name's size, as N=8"
    sub.add_argument(
        "--shape", action="append", default=[], type=assignment, metavar="NAME=DIMS", help=text
    )
    text = "first dimension of the other inputs, a number or a name"
    sub.add_argument("--batch", metavar="DIM", help=text)


def _add_measuring_commands(command: AddCommand) -> None:
    """Add the commands that measure models, and warmup."""
    sub = command("bench", bench)
    _model(sub)
    _inputs(sub)
    sub.add_argument(
        "--vs", type=listed, default=[], metavar="A,B", help="onnxruntime, openvino, torch"
    )
    text = "threads of each runtime (default 1)"
    sub.add_argument("--threads", type=whole(1, 1024), default=1, metavar="N", help=text)
    text = "approximate time of each runtime (default 3)"
    sub.add_argument("--seconds", type=positive, default=3, metavar="S", help=text)
    text = "of Subgraph's and OpenVINO's products (default float32)"
    sub.add_argument("--precision", choices=("float32", "bfloat16"), default="float32", help=text)

    sub = command("profile", profile)
    _model(sub, exported=True)
    _device(sub, "CPU")
    _inputs(sub)
    text = "runs to measure (default 10)"
    sub.add_argument("--repeat", type=whole(1), default=10, metavar="N", help=text)
    text = "steps to show (default 25)"
    sub.add_argument("--top", type=whole(1), default=25, metavar="N", help=text)
    sub.add_argument("--trace", type=path, metavar="FILE", help="write a trace for Perfetto")
    _picture(sub, "how much of the time each node takes")
    text = "time each region alone on each of these devices, in order of priority, and whole runs"
    sub.add_argument("--devices", type=listed, default=[], metavar="A,B", help=text)
    text = "write the times, for the option PROFILE of HETERO and AUTO (PLACEMENT=COST)"
    sub.add_argument("-o", "--output", type=path, metavar="FILE", help=text)

    sub = command("accuracy", accuracy)
    _model(sub)
    _inputs(sub)
    _config(sub)
    text = "a quantised model of the same network, compared with this one"
    sub.add_argument("--quantized", type=path, metavar="FILE", help=text)
    text = "inputs to compare (default 8)"
    sub.add_argument("--samples", type=whole(1), default=8, metavar="N", help=text)

    sub = command("warmup", warmup)
    text = "models whose kernels to compile (default: small models of every operator family)"
    sub.add_argument("models", nargs="*", type=path, help=text)
    text = "the option INFERENCE_PRECISION of the runs to come (default: none)"
    sub.add_argument("--precision", choices=("float32", "bfloat16"), default="", help=text)


def _inputs(sub: Any) -> None:
    sub.add_argument(
        "--input",
        action="append",
        default=[],
        type=assignment,
        metavar="NAME=SOURCE",
        help="an input: a .npy or .pb file, or random (the default for all)",
    )
    text = "the size of a symbolic dimension of random inputs; INPUT.AXIS is one without a name"
    sub.add_argument(
        "--dim", action="append", default=[], type=assignment, metavar="NAME=SIZE", help=text
    )
    sub.add_argument("--seed", type=whole(0), default=0, help="seed of random inputs (default 0)")


def _picture(sub: argparse.ArgumentParser, what: str) -> None:
    text = f"write a picture: {what}; .html (a page to search in), .svg or .dot (Graphviz)"
    sub.add_argument("--picture", "--dot", type=picture, metavar="FILE", help=text)


def _model(sub: Any, *, exported: bool = False) -> None:
    text = "an .onnx file, or one that `subgraph compile` wrote" if exported else "an .onnx file"
    sub.add_argument("model", type=path, help=text)


def _device(sub: Any, default: str = "AUTO") -> None:
    text = f"CPU, OPENCL, HETERO:OPENCL,CPU, ... (default {default})"
    sub.add_argument("--device", default=default, help=text)
    _config(sub)


def _config(sub: Any) -> None:
    sub.add_argument(
        "--config",
        action="append",
        default=[],
        type=assignment,
        metavar="KEY=VALUE",
        help="a device property; `subgraph devices --properties` lists them",
    )


def _cut(sub: Any) -> None:
    how = sub.add_mutually_exclusive_group()
    how.add_argument(
        "--ops", type=listed, metavar="A,B", help="take these operators (default: all)"
    )
    how.add_argument("--selector", metavar="NAME", help="a registered selector")
    how.add_argument("--property", metavar="NAME", help="a registered property")
    sub.add_argument(
        "--strategy",
        choices=("selector", "hetero"),
        help="how regions grow: like MXNet's selectors (default), or largest first like HETERO's",
    )
    sub.add_argument("--min-size", type=whole(1), metavar="N", help="least nodes of a subgraph")
    sub.add_argument("--max-subgraphs", type=whole(0), metavar="N", help="make at most N")
    sub.add_argument("--include", action="append", metavar="NODE", help="select this node")
    sub.add_argument("--exclude", action="append", metavar="NODE", help="do not select this node")

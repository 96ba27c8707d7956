"""The commands `subgraph bench`, `profile` and `warmup`."""

from __future__ import annotations

import argparse

import subgraph as sg
from subgraph.devices.device import DeviceList
from subgraph.devices.virtual import split_config
from subgraph.tools.cli_inputs import compiled_model, input_arrays, listed, ports
from subgraph.tools.cli_output import Output, Row, how_to_show


def bench(args: argparse.Namespace) -> None:
    """Time a model on Subgraph and other runtimes, interleaved, and compare the results."""
    from subgraph.tools.bench import check_peers, fastest_peer, measure

    out = Output(args)
    check_peers(args.vs)
    with out.progress("loading"):
        inputs = ports(sg.load(args.model))
        arrays = input_arrays(inputs, dict(args.input), dict(args.dim), args.seed)
    with out.progress("measuring"):
        measured = measure(
            args.model,
            arrays,
            peers=args.vs,
            threads=args.threads,
            seconds=args.seconds,
            precision=args.precision,
        )
    best = fastest_peer(measured)
    rows = [one.row(best) for one in measured]
    out.table(f"{args.model.name}, {args.threads} thread(s)", rows)
    out.finish({"rows": rows})


def profile(args: argparse.Namespace) -> None:
    """Show time, FLOP/s and bandwidth of each kernel of a run, next to the machine's peak.

    With --devices or --output: the time of each region on each device, of transfers and of whole
    runs; and where PLACEMENT=COST runs each region, and why.
    """
    from subgraph.tools.profiling import Limits, core_limit, profile_model, write_trace

    if args.devices or args.output is not None:
        _profile_regions(args)
        return
    out = Output(args)
    with out.progress("loading and compiling"):
        args.config = [*args.config, ("ENABLE_PROFILING", "1")]
        model = compiled_model(args)
        arrays = input_arrays(model.inputs, dict(args.input), dict(args.dim), args.seed)
    with out.progress("measuring"):
        cores = core_limit(model)
        limits = Limits.measure(cores)
        entries = profile_model(model, arrays, args.repeat)
        limits = limits.maximum(Limits.measure(cores))
    total = sum(entry.seconds for entry in entries)
    shown = sorted(entries, key=lambda entry: -entry.seconds)[: args.top]
    rows = [limits.row(entry, total) for entry in shown]
    if args.trace is not None:
        write_trace(args.trace, entries)
    if args.picture is not None:
        sg.visualize(model, profile=entries).save(args.picture)
    out.table(f"{len(rows)} of {len(entries)} steps, slowest first", rows)
    facts: Row = {
        "total_ms": round(total * 1e3, 4),
        "gflop_per_s": round(sum(e.flops for e in entries) / max(total, 1e-12) / 1e9, 2),
        "cores": cores,
        "limit_gflop_per_s": round(limits.flops / 1e9, 1),
        "limit_gb_per_s_of_memory": round(limits.bytes[max(limits.bytes)] / 1e9, 1),
    }
    out.facts(facts)
    if args.trace is not None:
        out.line(f"wrote {args.trace}: open it in chrome://tracing or ui.perfetto.dev")
    if args.picture is not None:
        out.line(f"wrote {args.picture}: {how_to_show(args.picture)}")
    out.finish({"steps": rows, **facts})


def warmup(args: argparse.Namespace) -> None:
    """Compile the kernels of models before their first run, and store them on disk."""
    from subgraph.tools.warmup import prepared_graphs, warm

    out = Output(args)
    graphs = prepared_graphs(args.models)
    with out.bar("compiling", len(graphs)) as show:
        compiled = warm(graphs, show, args.precision)
    facts: Row = {"models": len(args.models) or "built in", "compiled": compiled}
    out.facts(facts)
    out.finish(facts)


def _profile_regions(args: argparse.Namespace) -> None:
    """Time regions and whole runs on each device, and transfers, for placement by cost."""
    from subgraph.devices.placement.chooser import HeteroPlacement, MeasuredPlacement
    from subgraph.devices.placement.profiles import write_profile

    out = Output(args)
    core = sg.default_core()
    graph = sg.load(args.model)
    arrays = input_arrays(ports(graph), dict(args.input), dict(args.dim), args.seed)
    devices = [core.device(name) for name in args.devices or listed(args.device)]
    config = dict(args.config)
    configs = split_config(config, (), devices, "subgraph profile")
    chosen = DeviceList(devices, configs, None)
    placement = HeteroPlacement(chosen, core.device, MeasuredPlacement("COST", ""))
    with out.progress("measuring"):
        measured = placement.measured(graph, arrays, repeats=args.repeat)
    facts: Row = {
        "transfer us": round(measured.link.latency * 1e6, 2),
        "transfer GB/s": round(measured.link.bandwidth * 1e-9, 2),
    }
    if args.output is not None:
        write_profile(args.output, measured)
        facts["file"] = str(args.output)
    facts |= {f"ms of a run, {name}": round(s * 1e3, 3) for name, s in measured.runs.items()}
    if len(devices) > 1:
        facts["alone"] = placement.table["alone"] or "no: several devices together are faster"
    rows: list[Row] = [
        {"region": row["region"], "nodes": row["nodes"], "device": row["device"]}
        | {f"{d.name} us": _us(row["seconds"].get(d.name)) for d in devices}
        | {"transfers us": _us(row["transfer_seconds"]), "why": row["reason"]}
        for row in placement.table["regions"]
    ]
    out.table("time of each region alone, and where it runs", rows)
    out.facts(facts)
    out.finish({"rows": rows, **facts})


def _us(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e6, 2)

"""Profiles of plans: what is known of each step before it runs, and the times of a run."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

import attrs

from subgraph.engine.planner.lowering import EmittedStep
from subgraph.engine.planner.plan_types import Item, Plan
from subgraph.operators.region_names import region_of
from subgraph.operators.subgraph_op import ProfileEntry

Span = tuple[float, float]


def profile_entries(plan: Plan) -> tuple[ProfileEntry, ...]:
    """Return what is known of every step of a plan before it runs."""
    return tuple(map(_entry, plan.items))


def _entry(item: Item) -> ProfileEntry:
    if isinstance(item, EmittedStep):
        kernel = item.kernel.description.removeprefix("subgraph.ops.")
        moved, flops = item.bytes, item.flops
    else:
        kernel, flops = "reference", 0
        moved = sum(o.nbytes for o in (*item.inputs, *item.outputs) if o is not None)
    node = item.node
    return ProfileEntry(
        node.name, node.op_type, "CPU", kernel, 0.0, moved, flops, region=region_of(node)
    )


def with_times(
    entries: Sequence[ProfileEntry], spans: Sequence[Span], thread: int
) -> list[ProfileEntry]:
    """Return the entries of steps with their times; those of skipped ones, NaN, are left out.

    Args:
        entries: What is known of each step.
        spans: When each began and ended, in seconds of ``time.perf_counter``.
        thread: Identifier of the thread that ran them, 0 for a queue of the device.

    An If with steps in both branches looks twice at its condition: one entry tells of both.
    """
    found: list[ProfileEntry] = []
    conditions: dict[str, int] = {}
    for entry, (start, end) in zip(entries, spans, strict=True):
        if isnan(start):
            continue
        taken = end - start
        if entry.op_type == "If" and entry.bytes == 0:
            first = conditions.setdefault(entry.node, len(found))
            if first < len(found):
                whole = found[first].seconds + taken
                found[first] = attrs.evolve(found[first], seconds=whole, end=end)
                continue
        found.append(attrs.evolve(entry, seconds=taken, start=start, end=end, thread=thread))
    return found

"""Profiles of plans: an entry for each step, with the times of a run."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

import attrs

from subgraph.engine.planner.operands import EmittedStep
from subgraph.engine.planner.plan_types import Item, Plan
from subgraph.operators.region_names import region_of
from subgraph.operators.subgraph_op import ProfileEntry

Span = tuple[float, float]  # begin and end of a step, in seconds of ``time.perf_counter``


def profile_entries(plan: Plan) -> tuple[ProfileEntry, ...]:
    """Return the profile entry of every step of a plan, with 0 seconds."""
    return tuple(map(_entry, plan.items))


def shown_kernel(description: str) -> str:
    """Return the name of a kernel in profile entries."""
    return description.removeprefix("subgraph.ops.")


def _entry(item: Item) -> ProfileEntry:
    if isinstance(item, EmittedStep):
        kernel = shown_kernel(item.kernel.description)
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
    """Return the entries of the steps that ran, with their times.

    An If whose branches both have steps reads its condition twice; both times are in one entry.

    Args:
        entries: The entry of each step.
        spans: Begin and end of each step, in seconds of ``time.perf_counter``; NaN if it was
            skipped.
        thread: Identifier of the thread that ran them, 0 for a queue of the device.
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

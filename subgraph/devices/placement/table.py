"""`PlacementTable`: where each measured region runs, with the times of all candidates and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from subgraph.devices.placement.cost import Link, value_bytes
from subgraph.graph.graph import Graph, Value


class PlacementTable(dict[str, Any]):
    """The result of a placement by measured times; ``print`` shows it as a table.

    ``table["regions"]`` has a dict for each region: ``region`` (its name), ``nodes`` (their
    number), ``device``, ``seconds`` (by device, of the region alone), ``transfer_bytes`` and
    ``transfer_seconds`` (of values that come from other devices), and ``reason``.
    ``table["runs"]`` has the seconds of whole runs on each device alone, and MIXED;
    ``table["alone"]`` names the device that runs all that it supports, "" if the regions were
    placed one by one.
    """

    @classmethod
    def of(
        cls,
        graph: Graph,
        homes: Mapping[str, str],
        times: Mapping[str, Mapping[str, float]],
        link: Link,
        runs: Mapping[str, float],
        alone: str = "",
    ) -> PlacementTable:
        """Return the table of a graph with one node for each region.

        Args:
            graph: The graph.
            homes: Device by region.
            times: Seconds by device and region.
            link: Cost of transfers.
            runs: Seconds of whole runs.
            alone: Device that runs all that it can since a whole run on it was the fastest, or "".
        """
        rows: list[dict[str, Any]] = []
        moved: set[tuple[Value, str]] = set()
        for node in graph.nodes:
            home = homes.get(node.name)
            if home is None or node.name not in times.get(home, {}):
                continue
            away = {
                value
                for value in node.sources
                if value.producer is not None
                and homes.get(value.producer.name, home) != home
                and (value, home) not in moved
            }
            moved.update((value, home) for value in away)
            seconds = {name: row[node.name] for name, row in times.items() if node.name in row}
            reason = "a run on it alone is the fastest" if home == alone else _reason(home, seconds)
            rows.append(
                {
                    "region": node.name,
                    "nodes": 1 if node.subgraph is None else len(node.subgraph.nodes),
                    "device": home,
                    "seconds": seconds,
                    "transfer_bytes": sum(value_bytes(value) for value in away),
                    "transfer_seconds": sum(link.seconds(value_bytes(v)) for v in away),
                    "reason": reason,
                }
            )
        return cls(regions=rows, runs=dict(runs), alone=alone)

    def __str__(self) -> str:
        """Return the table as lines of text, times in microseconds."""
        devices = list(dict.fromkeys(d for row in self["regions"] for d in row["seconds"]))
        width = max([len("region"), *(len(row["region"]) for row in self["regions"])])
        columns = "".join(f" {name:>12}" for name in devices)
        lines = [f"{'region':{width}} {'device':12}{columns} {'transfers':>10}  why (times in us)"]
        for row in self["regions"]:
            seconds = row["seconds"]
            cells = (f"{seconds[d] * 1e6:.1f}" if d in seconds else "-" for d in devices)
            lines.append(
                f"{row['region']:{width}} {row['device']:12}"
                + "".join(f" {cell:>12}" for cell in cells)
                + f" {row['transfer_seconds'] * 1e6:10.1f}  {row['reason']}"
            )
        lines += [f"whole run, {name}: {s * 1e6:.1f}" for name, s in self["runs"].items()]
        return "\n".join(lines)


def _reason(home: str, seconds: Mapping[str, float]) -> str:
    """Return why a region runs on a device.

    Args:
        home: The device.
        seconds: The region's times by device.
    """
    if len(seconds) == 1:
        return "no other device runs it alone"
    best = min(seconds, key=seconds.__getitem__)
    if seconds[home] <= seconds[best]:
        return "fastest"
    saved = (seconds[home] - seconds[best]) * 1e6
    return f"{best} saves {saved:.1f} us, transfers cost more"

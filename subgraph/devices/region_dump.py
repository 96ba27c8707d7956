"""Dumps of the regions that HETERO compiled: one ONNX file each, to inspect or run elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

from subgraph.devices.export import region_nodes
from subgraph.errors import file_error
from subgraph.graph.graph import Graph
from subgraph.operators.subgraph_op import AFFINITY
from subgraph.partition.regions import region_model


def dump_regions(graph: Graph, folder: str) -> list[Path]:
    """Write each region of a partitioned graph as a model of its own, weights included.

    The files are named "<graph>.<region>.<device>.onnx"; characters other than letters, digits,
    "_", "." and "-" become "_", and equal names get a number. Regions in bodies of control flow
    are included. Files of an earlier dump are overwritten.

    Args:
        graph: The graph; the metadata of its subgraph nodes names their devices.
        folder: The folder; it is created if it does not exist.

    Returns:
        The files, in the order of the regions.

    Raises:
        FileError: a file or the folder cannot be written.
    """
    from subgraph.onnx_format.file import save

    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise file_error("write", folder, error) from error
    written: list[Path] = []
    for node in region_nodes(graph):
        device = (node.metadata or {}).get(AFFINITY, "default")
        stem = re.sub(r"[^\w.-]", "_", f"{graph.name or 'graph'}.{node.name}.{device}")
        path, number = Path(folder, f"{stem}.onnx"), 1
        while path in written:
            number += 1
            path = Path(folder, f"{stem}.{number}.onnx")
        save(region_model(node), path)
        written.append(path)
    return written

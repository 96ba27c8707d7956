"""Two accelerators in one graph, in order of priority.

The first takes convolutions and the operators after them, the second takes other operators that the
first left. Regions of the first are single nodes for the second, so that no cycle forms. Run:
``python examples/two_properties.py``.
"""

from pathlib import Path

import numpy as np

import subgraph as sg
from subgraph import passes

MODEL = Path(__file__).with_name("digits.onnx")


class Convolutions(sg.SubgraphProperty):
    """Convolutions with batch normalisation, addition and activation."""

    def create_subgraph_selector(self) -> sg.SubgraphSelector:
        """Return a new selector."""
        return sg.ContainOpSelector({"Conv", "BatchNormalization", "Relu", "Add"})


class Arithmetic(sg.SubgraphProperty):
    """Operators on few numbers."""

    def create_subgraph_selector(self) -> sg.SubgraphSelector:
        """Return a new selector."""
        return sg.ContainOpSelector({"Gemm", "Softmax", "ReduceMean", "Reshape"})


def main() -> None:
    """Partition with both properties, run the graph with and without them, and compare."""
    graph = sg.load(MODEL)
    graph.attrs["subgraph_property"] = [Convolutions(), Arithmetic()]
    cut = passes.apply_pass(graph, "PartitionGraph", min_size=2)
    for node in cut.nodes:
        kind = "region" if node.subgraph else "node"
        size = f" of {len(node.subgraph.nodes)} nodes" if node.subgraph else ""
        print(f"{kind} {node.name}{size}")
    image = np.random.default_rng(0).random((3, 1, 8, 8), dtype=np.float32)
    before = sg.compile_model(graph, "CPU")(image=image)["probability"]
    after = sg.compile_model(cut, "CPU")(image=image)["probability"]
    print(f"largest difference {np.abs(before - after).max():.1e}")


if __name__ == "__main__":
    main()

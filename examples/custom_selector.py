"""A selector of your own: which nodes an accelerator takes, and why it refuses the others.

The imagined accelerator has 3 x 3 and 1 x 1 convolutions and cheap elementwise operators, but no
transcendental functions. Run: ``python examples/custom_selector.py``.
"""

from pathlib import Path

import subgraph as sg

MODEL = Path(__file__).with_name("digits.onnx")


class SmallKernels(sg.SubgraphSelector):
    """Start at a convolution with a small kernel, and grow to cheap nodes around it."""

    cheap = frozenset({"Relu", "BatchNormalization", "Add", "MaxPool"})

    def select(self, node: sg.Node) -> bool | sg.Reject:
        """Start a region only at a convolution that the accelerator has."""
        if node.op_type != "Conv":
            return sg.Reject(f"a region starts at a convolution, not at {node.op_type}")
        return self._takes(node)

    def select_input(self, node: sg.Node, input_node: sg.Node) -> bool | sg.Reject:
        """Grow towards producers."""
        return self._takes(input_node)

    def select_output(self, node: sg.Node, output_node: sg.Node) -> bool | sg.Reject:
        """Grow towards consumers."""
        return self._takes(output_node)

    def _takes(self, node: sg.Node) -> bool | sg.Reject:
        if node.op_type == "Conv":
            weight = node.inputs[1]
            assert weight is not None
            assert isinstance(weight.type, sg.TensorType)
            kernel = (weight.type.shape or ())[2:]
            if kernel in {(1, 1), (3, 3)}:
                return True
            return sg.Reject(f"its kernel is {kernel}; the accelerator has 1 x 1 and 3 x 3")
        if node.op_type in self.cheap:
            return True
        return sg.Reject(f"the accelerator has no {node.op_type}")


sg.register_selector("small_kernels", SmallKernels)


def main() -> None:
    """Partition the digits network; print every region, and why each other node is in none."""
    graph = sg.load(MODEL)
    cut = sg.optimize_for(graph, "small_kernels", min_size=2)
    for node in cut.nodes:
        if node.subgraph is not None:
            inside = ", ".join(inner.op_type for inner in node.subgraph.nodes)
            print(f"{node.name}: {inside}")
        else:
            print(sg.explain(cut, node))


if __name__ == "__main__":
    main()

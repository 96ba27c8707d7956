"""check_property: counterexamples, faults that it finds, and checks that test nothing."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.devices.backends.libraries.translation import writable_view
from subgraph.partition.property import SelectorProperty
from subgraph.testing import check_partition, check_property, feeds, topologies
from subgraph.testing.graph_templates import TEMPLATES
from tests.support.small_network import ladder


class PlusOne(sg.SubgraphOp):
    """Wrong by one."""

    def __init__(self, subgraph: sg.Graph) -> None:
        super().__init__(subgraph)
        self.inner = sg.compile_model(subgraph, "REFERENCE")

    def forward(self, inputs: list[Any]) -> list[Any]:
        arrays = [v.array if isinstance(v, sg.Parameter) else v for v in inputs]
        results = self.inner(arrays)
        return [results[k] + 1 for k in range(len(self.subgraph.outputs))]


class WrongRegions(SelectorProperty):
    """Regions of a selector, whose results are wrong by one."""

    def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int) -> sg.Node:
        return sg.subgraph_node(subgraph, op=PlusOne(subgraph))


class WrongWithNeg(sg.SubgraphProperty):
    """Takes arithmetic; the regions with a Neg come out wrong."""

    def create_subgraph_selector(self) -> sg.SubgraphSelector:
        return sg.ContainOpSelector({"Relu", "Neg", "Add", "Mul", "Sin"})

    def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int) -> sg.Node:
        wrong = any(node.op_type == "Neg" for node in subgraph.nodes)
        return sg.subgraph_node(subgraph, op=PlusOne(subgraph) if wrong else None)


def test_results_are_compared() -> None:
    x = sg.input("x", (4,))
    graph = sg.Graph([x], [ops.Neg(x, name="n")])
    cut = sg.optimize_for(graph, WrongWithNeg)
    check_partition(graph, cut)
    with pytest.raises(sg.PartitionError, match="invariant 7: output 'n' differs at"):
        check_partition(graph, cut, inputs=feeds(graph))


def graph_of(error: BaseException) -> str:
    """Return the graph that an error of `check_property` shows."""
    return str(error).partition("on the graph\n")[2].partition("\nas a test\n")[0]


def test_check_property_shows_a_small_counterexample() -> None:
    with pytest.raises(sg.PartitionError, match="differs at") as caught:
        check_property(WrongWithNeg, ops={"Relu", "Neg", "Add", "Mul", "Sin", "Tanh"})
    text = graph_of(caught.value)
    assert "Neg@" in text
    assert text.count("@") == 1, text
    check_property(sg.ContainOpSelector(TEMPLATES), max_examples=30, strategy=topologies())


def test_check_property_reports_what_a_property_raises() -> None:
    class Raises(WrongWithNeg):
        def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int) -> sg.Node:
            raise ValueError("no memory left")

    with pytest.raises(sg.PartitionError, match="no memory left") as caught:
        check_property(Raises)
    assert "on the graph\ngraph" in str(caught.value)


class Broken(sg.SubgraphOp):
    """Right but for what a child spoils."""

    def __init__(self, subgraph: sg.Graph) -> None:
        super().__init__(subgraph)
        self.inner = sg.compile_model(subgraph, "REFERENCE")
        self.kept: Any = None

    def right(self, inputs: list[Any]) -> list[Any]:
        arrays = [v.array if isinstance(v, sg.Parameter) else v for v in inputs]
        return list(self.inner(arrays).values())


class FirstResult(Broken):
    def forward(self, inputs: list[Any]) -> list[Any]:
        self.kept = self.kept or self.right(inputs)
        return self.kept


class FirstWeights(Broken):
    def forward(self, inputs: list[Any]) -> list[Any]:
        if self.kept is None:
            self.kept = [v.array if isinstance(v, sg.Parameter) else None for v in inputs]
        now = zip(self.kept, inputs, strict=True)
        return self.right([item if old is None else old for old, item in now])


class OneBuffer(Broken):
    def forward(self, inputs: list[Any]) -> list[Any]:
        results = self.right(inputs)
        if self.kept is None:
            self.kept = [np.empty_like(array) for array in results]
        for buffer, array in zip(self.kept, results, strict=True):
            buffer[...] = array
        return self.kept


class EveryOther(Broken):
    def forward(self, inputs: list[Any]) -> list[Any]:
        self.kept = not self.kept
        return [a if self.kept else -a for a in self.right(inputs)]


class InPlace(Broken):
    """Writes to its inputs by a library that does not see that they are read-only."""

    def forward(self, inputs: list[Any]) -> list[Any]:
        results = self.right(inputs)
        for value in inputs:
            if not isinstance(value, sg.Parameter):
                writable_view(value)[...] = 0
        return results


class Reversed(Broken):
    def forward(self, inputs: list[Any]) -> list[Any]:
        return self.right(inputs)[::-1]


class WithoutWeights(Broken):
    def forward(self, inputs: list[Any]) -> list[Any]:
        return self.right([v.array * 0 if isinstance(v, sg.Parameter) else v for v in inputs])


@pytest.mark.parametrize(
    ("op", "says", "most_nodes"),
    [
        (FirstResult, "in a second run, with other inputs: invariant 7", 1),
        (FirstWeights, "after weights were changed .*: invariant 7", 1),
        (OneBuffer, "a later run changed results of an earlier run", 1),
        (EveryOther, "in a second run", 1),
        (InPlace, "a run changed the array of input", 1),
        (Reversed, "invariant 7: output", 2),
        (WithoutWeights, "invariant 7: output", 1),
    ],
)
def test_broken_operators_give_small_counterexamples(
    op: type[Broken], says: str, most_nodes: int
) -> None:
    class Property(sg.SubgraphProperty):
        def create_subgraph_selector(self) -> sg.SubgraphSelector:
            return sg.ContainOpSelector({"Relu", "Neg", "Add", "Mul", "Sin"})

        def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int) -> sg.Node:
            return sg.subgraph_node(subgraph, op=op(subgraph))

    with pytest.raises(sg.PartitionError, match=says) as caught:
        check_property(Property, ops={"Relu", "Neg", "Add", "Mul", "Sin"})
    shown = sg.parse(graph_of(caught.value))
    assert len(shown.nodes) <= most_nodes
    assert "property Property fails" in str(caught.value)


def test_check_property_leaves_weights_as_they_were() -> None:
    x, w = sg.input("x", (2,)), sg.parameter("w", np.array([1, 2], np.float32))
    graph = sg.Graph([x], [ops.Add(x, w)])
    from hypothesis import strategies as st

    check_property(sg.ContainOpSelector({"Add"}), strategy=st.just(graph), max_examples=1)
    np.testing.assert_array_equal(graph.parameters["w"].array, [1, 2])


def test_a_failing_graph_is_taken_apart() -> None:
    from subgraph.testing.shrinking import shrink_graph

    graph = ladder()
    small = shrink_graph(graph, lambda g: any(node.op_type == "Sub" for node in g.nodes))
    assert [node.op_type for node in small.nodes] == ["Sub"]
    assert len(graph.nodes) == 7
    small.verify()
    assert shrink_graph(graph, lambda g: False) is graph


@pytest.mark.parametrize(
    "op_types",
    [{"Conv"}, {"Gemm"}, {"Softmax"}, {"LSTM"}, {"Resize"}, {"Attention"}, {"Conv", "Relu", "Add"}],
    ids=lambda op_types: "+".join(sorted(op_types)),
)
def test_check_property_tries_what_a_selector_takes(op_types: set[str]) -> None:
    tried = check_property(sg.ContainOpSelector(op_types), max_examples=20)
    assert set(tried.taken) == op_types
    assert set(tried.nodes) == op_types
    assert tried.graphs >= 20
    assert tried.nodes.total() >= tried.regions >= 10
    assert tried.calls >= 3 * tried.regions


class Grows(sg.SubgraphSelector):
    """A Conv, and what follows it."""

    def select(self, node: sg.Node) -> bool:
        return node.op_type == "Conv" and node.inputs[0] is not None

    def select_output(self, node: sg.Node, output_node: sg.Node) -> bool:
        return output_node.op_type in ("Relu", "Clip")


class Joins(sg.SubgraphSelector):
    """Takes Add and Sub of the results of two nodes."""

    def select(self, node: sg.Node) -> bool:
        makers = {value.producer for value in node.inputs if value is not None and value.producer}
        return node.op_type in ("Add", "Sub") and len(makers) == 2


class Bytes(sg.SubgraphSelector):
    """Takes Add of int8."""

    def select(self, node: sg.Node) -> bool:
        type_ = node.outputs[0].type
        return node.op_type == "Add" and isinstance(type_, sg.TensorType) and type_.dtype == "int8"


@pytest.mark.parametrize("selector", [Joins, Bytes])
def test_check_property_tries_selectors_of_joins_and_of_other_dtypes(
    selector: type[sg.SubgraphSelector],
) -> None:
    tried = check_property(selector, max_examples=100)
    assert tried.taken == (("Add", "Sub") if selector is Joins else ("Add",))
    assert tried.calls > 0

    with pytest.raises(sg.PartitionError, match="differs at"):
        check_property(WrongRegions(selector), max_examples=100)


def test_check_property_finds_out_where_a_region_grows() -> None:
    tried = check_property(Grows, max_examples=160)
    assert set(tried.taken) == {"Conv", "Relu", "Clip"}
    assert set(tried.nodes) == {"Conv", "Relu", "Clip"}


def accelerator(op: type[sg.SubgraphOp] | None, *op_types: str) -> type[sg.SubgraphProperty]:
    """Return a property that takes these operators and runs regions by ``op``."""

    class Accelerator(sg.SubgraphProperty):
        def create_subgraph_selector(self) -> sg.SubgraphSelector:
            return sg.ContainOpSelector(op_types)

        def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int) -> sg.Node:
            return sg.subgraph_node(subgraph, op=None if op is None else op(subgraph))

    return Accelerator


class SwapsInputs(Broken):
    """Mixes up its first two inputs of one shape."""

    def forward(self, inputs: list[Any]) -> list[Any]:
        arrays = [v.array if isinstance(v, sg.Parameter) else v for v in inputs]
        if len(arrays) > 1 and arrays[0].shape == arrays[1].shape:
            arrays[:2] = arrays[1::-1]
        return list(self.inner(arrays).values())


class IgnoresAttributes(Broken):
    """Takes every attribute for its default."""

    ignored = frozenset({"axis", "alpha", "mode", "linear_before_reset", "is_causal"})

    def __init__(self, subgraph: sg.Graph) -> None:
        super().__init__(subgraph)
        plain = subgraph.clone()
        for node in plain.nodes:
            for key in self.ignored & node.attrs.keys():
                del node.attrs[key]
        self.inner = sg.compile_model(plain, "REFERENCE")


class RightForImages(Broken):
    """Right where everything has four dimensions."""

    def forward(self, inputs: list[Any]) -> list[Any]:
        data = [v for v in inputs if not isinstance(v, sg.Parameter)]
        images = all(v.ndim == 4 for v in data)
        return [a if images or a.dtype.kind != "f" else a + 1 for a in self.right(inputs)]


@pytest.mark.parametrize(
    ("op", "op_types"),
    [
        (SwapsInputs, ["Sub"]),
        (SwapsInputs, ["MatMul"]),
        (SwapsInputs, ["Concat"]),
        (SwapsInputs, ["Attention"]),
        (SwapsInputs, ["Conv", "Relu", "Sub"]),
        (FirstWeights, ["Conv"]),
        (FirstWeights, ["Gemm"]),
        (FirstWeights, ["LSTM"]),
        (IgnoresAttributes, ["Softmax"]),
        (IgnoresAttributes, ["LeakyRelu"]),
        (IgnoresAttributes, ["Gemm"]),
        (IgnoresAttributes, ["Resize"]),
        (IgnoresAttributes, ["GRU"]),
        (IgnoresAttributes, ["Attention"]),
        (RightForImages, ["Softmax"]),
        (RightForImages, ["Conv"]),
        (RightForImages, ["MaxPool", "Relu"]),
    ],
)
def test_planted_faults_are_found(op: type[Broken], op_types: list[str]) -> None:
    with pytest.raises(sg.PartitionError, match="property Accelerator fails") as caught:
        check_property(accelerator(op, *op_types))
    assert len(sg.parse(graph_of(caught.value)).nodes) <= 2


class Right(Broken):
    """Nothing is wrong with it."""

    def forward(self, inputs: list[Any]) -> list[Any]:
        return self.right(inputs)


def test_a_right_accelerator_passes() -> None:
    taken = ["Conv", "Softmax", "Gemm", "Resize", "Attention", "LSTM", "Sub", "Einsum"]
    tried = check_property(accelerator(Right, *taken), max_examples=60)
    assert tried.own_calls == tried.calls > 100
    assert tried.own == tried.regions
    assert set(tried.nodes) == set(taken)


def test_an_op_that_is_never_called_is_an_error() -> None:
    with pytest.raises(sg.PartitionError, match="an op of its own was never called: all "):
        check_property(accelerator(None, "Relu"), max_examples=5)


def test_a_check_in_which_nothing_runs_is_an_error() -> None:
    says = "tried on 5 graphs, but not one region was made: nothing was tested.*takes: Conv"
    with pytest.raises(sg.PartitionError, match=says):
        check_property(sg.ContainOpSelector({"Conv"}), max_examples=5, min_size=50)
    with pytest.raises(sg.PartitionError, match="not one region was made"):
        check_property(sg.SubgraphSelector, max_examples=5)

    class Refuses(accelerator(Right, "Relu")):
        def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int) -> Any:
            return sg.Reject("too small")

    with pytest.raises(sg.PartitionError, match="not one region was made"):
        check_property(Refuses, max_examples=5)


def test_calls_are_counted_through_sessions_of_an_ops_own() -> None:
    class Door(sg.Session):
        def __call__(self, inputs: Any, outputs: Any = None) -> Any:
            return self.op.right(inputs)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]

    class WithDoor(Broken):
        def session(self) -> sg.Session:
            return Door(self)

    tried = check_property(accelerator(WithDoor, "Relu"), max_examples=5)
    # Regions in a branch of an If that is not taken are not called.
    assert tried.own_calls == tried.calls >= 3 * tried.regions > 0


def test_models_of_ones_own_are_tried() -> None:
    fine = ladder()
    tried = check_property(
        accelerator(Right, "Add"), models=[fine, sg.to_onnx(fine)], max_examples=0
    )
    assert (tried.graphs, tried.regions, tried.nodes["Add"]) == (2, 2, 2)
    with pytest.raises(sg.PartitionError, match="property Accelerator fails"):
        check_property(accelerator(SwapsInputs, "Sub"), models=[ladder()], max_examples=0)
    with pytest.raises(sg.PartitionError, match="not one region"):
        check_property(sg.ContainOpSelector({"Conv"}), models=[ladder()], max_examples=0)


class WrongGemm(sg.SubgraphProperty):
    """Wrong by one, with a Gemm."""

    def create_subgraph_selector(self) -> sg.SubgraphSelector:
        return sg.ContainOpSelector({"Gemm"})

    def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int) -> sg.Node:
        return sg.subgraph_node(subgraph, op=PlusOne(subgraph))


@pytest.mark.parametrize("size", [3, 300])
def test_the_counterexample_is_a_python_test(size: int) -> None:
    rng = np.random.default_rng(0)
    x, w = sg.input("x", (2, size)), sg.parameter("w", rng.standard_normal((size, 4), np.float32))
    graph = sg.Graph([x], [ops.Neg(ops.Gemm(ops.Relu(x), w))])
    with pytest.raises(sg.PartitionError) as caught:
        check_property(WrongGemm, models=[graph], max_examples=0)
    source = str(caught.value).partition("\nas a test\n")[2]
    assert f"from {__name__} import WrongGemm" in source
    assert ("base64" in source) == (size == 300)
    space: dict[str, Any] = {}
    exec(source, space)
    with pytest.raises(sg.PartitionError, match="invariant 7: output"):
        space["test_counterexample"]()


def gelu() -> sg.Graph:
    x = sg.input("x", (3, 16))
    half = ops.Mul(x, np.float32(0.5))
    scaled = ops.Add(ops.Erf(ops.Div(x, np.float32(2**0.5))), np.float32(1))
    return sg.Graph([x], [ops.Neg(ops.Mul(half, scaled))])


def residual() -> sg.Graph:
    """Return a product whose operand is added to it."""
    x, w = sg.input("x", (4, 4)), sg.parameter("w", np.eye(4, dtype=np.float32))
    return sg.Graph([x], [ops.Add(x, ops.MatMul(x, w))])


def qdq() -> sg.Graph:
    """Return a product of dequantized operands, whose result is quantized."""
    x = sg.input("x", (3, 16))
    scale, zero = np.float32(0.02), np.uint8(120)
    w = sg.parameter("w", np.arange(128, dtype=np.int8).reshape(16, 8) % 7)
    left = ops.DequantizeLinear(ops.QuantizeLinear(x, scale, zero), scale, zero)
    product = ops.MatMul(left, ops.DequantizeLinear(w, scale, np.int8(0)))
    end = ops.QuantizeLinear(product, np.float32(0.1), zero)
    return sg.Graph([x], [ops.DequantizeLinear(end, np.float32(0.1), zero)])


FUSIONS: dict[str, dict[str, Any]] = {
    "cpu_elementwise": {"ops": ["Relu", "Mul", "Tanh"], "max_examples": 40},
    "cpu_epilogue": {
        "ops": ["MatMul", "Relu", "Add"],
        "models": [residual()],
        "max_examples": 100,
    },
    "cpu_transformer": {"models": [gelu()], "max_examples": 0},
    "cpu_quantized": {"models": [qdq()], "max_examples": 0, "atol": 0.11},
}


@pytest.mark.parametrize("name", FUSIONS)
def test_the_devices_own_fusions_are_tried_on_it(name: str) -> None:
    """Their nodes have no op: on REFERENCE, where they would run one by one, nothing is tried."""
    report = check_property(name, device="CPU", **FUSIONS[name])
    assert report.own == report.regions
    assert report.own_calls >= report.own > 0
    with pytest.raises(sg.PartitionError, match=r"regions were never called on REFERENCE"):
        check_property(name, **FUSIONS[name])


def test_every_property_of_ours_is_tried() -> None:
    assert {name for name in sg.list_properties() if name.startswith("cpu_")} == set(FUSIONS)


@sg.register_property("test_wrong_fusion")
class WrongFusion(sg.SubgraphProperty):
    """Swaps the operands of a product in a node that the CPU has a kernel for."""

    min_size = 2

    def create_subgraph_selector(self) -> sg.SubgraphSelector:
        return sg.ContainOpSelector({"Sub", "Relu"})

    def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int) -> sg.Node | None:
        first, last = subgraph.nodes[0], subgraph.nodes[-1]
        if (first.op_type, last.op_type) != ("Sub", "Relu") or len(subgraph.inputs) != 2:
            return None
        made = sg.Graph(subgraph.inputs, [ops.Neg(subgraph.outputs[0])], nodes=subgraph.nodes)
        ends = [sg.Value(v.name, v.type, parameter=v.parameter) for v in subgraph.inputs]
        return sg.Node(
            "FusedElementwise",
            ends,
            outputs=[sg.Value("", subgraph.outputs[0].type)],
            domain="subgraph.cpu",
            version=1,
            subgraph=made,
        )


def test_a_wrong_fusion_is_found_on_its_device() -> None:
    with pytest.raises(sg.PartitionError, match=r"device='CPU'"):
        check_property("test_wrong_fusion", device="CPU", ops=["Sub", "Relu"], max_examples=60)


class Chains(sg.SubgraphSelector):
    """Takes a product by a weight, a sum with a row and a Relu together, and nothing else."""

    order = ("MatMul", "Add", "Relu")

    def __init__(self) -> None:
        self.found: list[sg.Node] = []

    def select(self, node: sg.Node) -> bool:
        self.found = [node]
        weight = node.inputs[-1] if node.op_type == "MatMul" else None
        return weight is not None and weight.parameter is not None

    def select_output(self, node: sg.Node, output_node: sg.Node) -> bool:
        place = len(self.found)
        if len(node.outputs[0].consumers) != 1 or self.order[place : place + 1] != (
            output_node.op_type,
        ):
            return False
        self.found.append(output_node)
        return True

    def filter(self, candidates: list[sg.Node]) -> list[sg.Node]:
        return candidates if len(candidates) == 3 else []


class Upwards(Chains):
    """The same, from the Relu to the product."""

    order = ("Relu", "Add", "MatMul")

    def select(self, node: sg.Node) -> bool:
        self.found = [node]
        return node.op_type == "Relu"

    def select_input(self, node: sg.Node, input_node: sg.Node) -> bool:
        return super().select_output(input_node, input_node)

    def select_output(self, node: sg.Node, output_node: sg.Node) -> bool:
        return False


@pytest.mark.parametrize("selector", [Chains, Upwards])
def test_chains_by_weights_are_tried(selector: type[sg.SubgraphSelector]) -> None:
    """Not one region was made: no operand of the nodes in question was a weight."""
    tried = check_property(selector)
    assert tried.taken == ("Add", "MatMul", "Relu")
    assert tried.regions >= 2
    assert tried.nodes["Relu"] == tried.nodes["MatMul"] == tried.regions

    with pytest.raises(sg.PartitionError, match="differs at"):
        check_property(WrongRegions(selector))


def test_every_graph_has_an_operator_at_which_a_region_starts() -> None:
    class FromMatMul(sg.SubgraphSelector):
        def select(self, node: sg.Node) -> bool:
            return node.op_type == "MatMul"

        def select_output(self, node: sg.Node, output_node: sg.Node) -> bool:
            return True

    tried = check_property(FromMatMul, max_examples=20)
    assert tried.regions >= 15
    assert len(tried.nodes) > 5


@pytest.mark.parametrize(
    ("name", "owner"),
    [("custom_property", "ScaleShiftReluProperty"), ("custom_selector", "SmallKernels")],
)
def test_the_examples_are_tried_and_right(
    name: str, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    module = importlib.import_module(name)
    tried = check_property(getattr(module, owner))
    assert tried.regions >= 3
    assert tried.own_calls == (tried.calls if name == "custom_property" else 0)


def test_wrong_arguments_are_no_counterexamples() -> None:
    one: list[Any] = ["model.onnx", ladder()]
    for models in one:
        with pytest.raises(sg.PartitionError, match=r"models is one model, .*give a list"):
            check_property(sg.ContainOpSelector({"Relu"}), models=models, max_examples=0)
    with pytest.raises(sg.DeviceError, match="no device named 'CPUU'; did you mean 'CPU'"):
        check_property(sg.ContainOpSelector({"Relu"}), device="CPUU")

"""CUDNN without a card: the graphs that nodes become, and cuDNN's plans for a described card.

The graphs are made by cuDNN's frontend; NumPy computes them, in the place of the card, and the
results are compared with REFERENCE. Where libcudnn and a driver's libcuda are installed, cuDNN
plans the graphs for an H100 without one. What runs on a card is tested with the other backends, in
test_backends.py and test_operators.py, where there is one.
"""

from __future__ import annotations

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.devices.backends.base import BackendOp, library_model_of
from subgraph.devices.backends.cudnn import CudnnDevice
from subgraph.devices.backends.libraries.cudnn_graph import Step, steps_of
from subgraph.devices.backends.libraries.cudnn_model import CudnnModel
from subgraph.devices.backends.libraries.cudnn_plans import Planner
from subgraph.devices.backends.libraries.translation import parsed_model
from subgraph.graph.types import Array
from subgraph.transform.pass_manager import apply_pass
from tests.devices.backends.test_operators import USES
from tests.support.backends import no_package
from tests.support.cards.cudnn_graphs import NumpyCudnn, described_card
from tests.support.requirements import Use, floats

needs_package = pytest.mark.skipif(bool(no_package("CUDNN")), reason=no_package("CUDNN"))

X = floats(3, 4, 5)
MORE = [
    Use("Add", (X, floats(3, 1, 1))),
    Use("Add", (floats(4, 5), X)),
    Use("Add", (X, floats(1))),
    Use("Pow", (floats(6) + 2, floats(6))),
    Use("Gemm", (floats(3, 4), floats(5, 4), floats(5)), {"transB": 1}),
    Use("MatMul", (floats(2, 3, 4), floats(4, 6))),
    Use("BatchNormalization", (floats(2, 8, 4, 4), *[floats(8) + 2] * 4), version=15),
    Use("InstanceNormalization", (floats(2, 3, 4), floats(3), floats(3))),
    Use("LayerNormalization", (floats(3, 4, 6), floats(6), floats(6)), {"axis": -1}),
    Use("LayerNormalization", (floats(3, 4, 6), floats(4, 6)), {"axis": 1, "epsilon": 0.1}),
    *[Use(op, (X,)) for op in ("Abs", "Erf", "Exp", "Neg", "Sigmoid", "Tanh", "Relu", "Cos")],
    *[Use(op, (X + 3,)) for op in ("Log", "Reciprocal", "Sqrt", "Floor")],
]


class Cardless(CudnnDevice):
    """CUDNN on a machine without a card: it plans for an H100, and runs nothing."""

    def find_card(self) -> None:
        self.card = None
        self.planner = Planner(self.library, **described_card())


def graph_of_use(case: Use) -> tuple[sg.Graph, Array]:
    first = case.inputs[0]
    assert first is not None
    x = sg.input("x", type=sg.TensorType(first.dtype.name, first.shape))
    rest = [None if a is None else sg.parameter(f"w{k}", a) for k, a in enumerate(case.inputs[1:])]
    made = sg.Node(case.op, [x, *rest], version=case.version, attrs=case.attrs)
    return apply_pass(sg.Graph([x], made.outputs, "use"), "InferTypes"), first


def residual() -> sg.Graph:
    """Return two convolutions with Relu, a sum, and a dense layer."""
    rng = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> sg.Value:
        return sg.parameter(name, rng.standard_normal(shape).astype(np.float32))

    x = sg.input("x", type=sg.TensorType("float32", ("N", 4, 6, 6)))
    a = ops.Relu(ops.Conv(x, weight("w", 4, 4, 3, 3), pads=[1, 1, 1, 1]))
    b = ops.Conv(a, weight("v", 4, 4, 3, 3), weight("b", 4), pads=[1, 1, 1, 1])
    y = ops.Flatten(ops.Relu(ops.Add(b, a)))
    return sg.Graph([x], [ops.Gemm(y, weight("d", 144, 5), weight("c", 5)), a], "residual")


@pytest.fixture
def core() -> sg.Core:
    made = sg.Core()
    made.register_device("NUMPY", NumpyCudnn)
    return made


def assert_agrees(core: sg.Core, graph: sg.Graph, x: Array) -> None:
    wanted = sg.compile_model(graph, "REFERENCE")(x=x)
    found = core.compile_model(graph, "NUMPY", {"RUNTIME_FALLBACK": False})(x=x)
    for k in range(len(wanted)):
        assert found[k].shape == wanted[k].shape, str(graph)
        np.testing.assert_allclose(found[k], wanted[k], rtol=1e-4, atol=1e-5, err_msg=str(graph))


@needs_package
def test_graphs_compute_what_onnx_defines(core: sg.Core) -> None:
    taken: set[str] = set()
    for case in (*USES, *MORE):
        graph, x = graph_of_use(case)
        if core.query_model(graph, "NUMPY"):
            taken.add(case.name)
            assert_agrees(core, graph, x)
    assert {case.name for case in MORE} <= taken
    assert len(taken) >= 45


@needs_package
def test_what_a_card_computed_wrongly_is_refused(core: sg.Core) -> None:
    for case, reason in (
        (Use("Add", (X, floats(1, 4, 1))), "broadcasting over 3 x 4 x 5"),
        (Use("Mul", (floats(2, 5, 12), floats(5, 1))), "broadcasting over 2 x 5 x 12"),
        (Use("Add", (floats(2, 70000), floats(70000))), "broadcasting over 2 x 70000"),
        (Use("Transpose", (X,), {"perm": (1, 2, 0)}), "not translated"),
        (Use("Softplus", (X,)), "not translated"),
    ):
        graph, _ = graph_of_use(case)
        answer = core.query_model(graph, "NUMPY")
        assert answer == {}
        assert reason in "; ".join(answer.reasons.values())


@needs_package
def test_a_model_of_several_nodes(core: sg.Core) -> None:
    x = np.random.default_rng(1).standard_normal((3, 4, 6, 6)).astype(np.float32)
    assert len(core.query_model(residual(), "NUMPY")) == 7
    assert_agrees(core, residual(), x)
    assert_agrees(core, residual(), x[:1])


@needs_package
def test_terms_of_a_normalization_follow_the_batch(core: sg.Core) -> None:
    rng = np.random.default_rng(2)
    x = sg.input("x", ("N", 3, 4, 4))
    terms = [sg.parameter(f"w{k}", rng.random(3).astype(np.float32) + 0.5) for k in range(4)]
    graph = sg.Graph([x], [ops.BatchNormalization(x, *terms, outputs=1)], "normalized")
    model = core.compile_model(graph, "NUMPY", {"RUNTIME_FALLBACK": False})
    reference = sg.compile_model(graph, "REFERENCE")
    for rows in (1, 3, 2, 5, 1):
        given = rng.standard_normal((rows, 3, 4, 4)).astype(np.float32)
        np.testing.assert_allclose(model(given)[0], reference(given)[0], rtol=1e-4, atol=1e-5)


@needs_package
def test_memory_of_sizes_that_are_not_run_any_more_is_freed() -> None:
    core, device = sg.Core(), NumpyCudnn()
    core.register_device("NUMPY", device)
    x = sg.input("x", ("N", 3, 2, 2))
    terms = [sg.parameter(f"w{k}", floats(3) + 2) for k in range(4)]
    graph = sg.Graph([x], [ops.BatchNormalization(x, *terms, outputs=1)], "normalized")
    model = core.compile_model(graph, "NUMPY", {"RUNTIME_FALLBACK": False})
    reference = sg.compile_model(graph, "REFERENCE")
    assert device.card is not None
    held: list[int] = []
    for rows in (*range(1, 60), 3):
        given = floats(rows, 3, 2, 2)
        np.testing.assert_allclose(model(given)[0], reference(given)[0], rtol=1e-4, atol=1e-5)
        held.append(len(device.card.runtime.held))
    assert max(held) <= held[30] + 2


@needs_package
def test_the_kit(core: sg.Core) -> None:
    report = sg.testing.check_device("NUMPY", core=core, max_examples=4)
    assert set(report.passed) == set(sg.testing.DEVICE_CHECKS)


def planned(graph: sg.Graph, config: dict[str, str]) -> tuple[CudnnModel, Cardless]:
    core, device = sg.Core(), Cardless()
    core.register_device("CARDLESS", device)
    op = core.compile_model(graph, "CARDLESS", config).graph.nodes[0].op
    assert isinstance(op, BackendOp)
    model = op.compiled()
    assert isinstance(model, CudnnModel)
    return model, device


@pytest.mark.slow
def test_plans_for_a_described_card() -> None:
    """Convolutions have compiled plans, shared by layers of equal sizes, for one query and run."""
    described_card()
    model, device = planned(residual(), {"PRECISION": "f32", "WEIGHTS": "inputs"})
    assert model.inputs == ["x"]
    program = model.program(((3, 4, 6, 6),)).steps
    kinds = [step.kind.partition(" ")[0] for step, _ in program]
    assert kinds == ["Conv", "Conv", "Add", "Relu", "Flatten", "Gemm"]
    assert [kernel is None for _, kernel in program] == [kind == "Flatten" for kind in kinds]
    again, _ = planned(residual(), {})
    again.planner = device.planner
    assert [kernel for _, kernel in again.program(((3, 4, 6, 6),)).steps] == [k for _, k in program]


def test_refusals() -> None:
    described_card()
    core = sg.Core()
    core.register_device("CARDLESS", Cardless())

    def reason(*inputs: sg.Value, output: sg.Value) -> str:
        graph = sg.Graph(inputs, [output], "refused")
        return "; ".join(core.query_model(graph, "CARDLESS").reasons.values())

    x = sg.input("x", type=sg.TensorType("float32", (3, 4)))
    y = sg.input("y", type=sg.TensorType("float32", (4, 5)))
    n = sg.input("n", type=sg.TensorType("int64", (3, 4)))
    assert "Softmax is not translated" in reason(x, output=ops.Softmax(x))
    assert "input 1 is no weight" in reason(x, y, output=ops.MatMul(x, y))
    assert "cuDNN is used for float32" in reason(n, output=ops.Add(n, n))
    depthwise = sg.parameter("w", np.ones((4, 1, 3, 3, 3, 3), np.float32))
    image = sg.input("image", type=sg.TensorType("float32", (1, 4, 8, 8, 8, 8)))
    assert "failed with message" in reason(image, output=ops.Conv(image, depthwise, group=4))


def test_keys_of_plans() -> None:
    """Plans are shared by parts with equal operations, sizes and attributes alone."""

    def step(op: str, *inputs: Array | None, **attrs: object) -> Step:
        graph, x = graph_of_use(Use(op, inputs, dict(attrs)))
        body, version, weights = parsed_model(library_model_of(graph, [0]))
        [found] = steps_of(body, version, weights, {"x": x.shape})
        return found

    image, filters = floats(2, 3, 9, 8), floats(6, 3, 3, 3)
    plain = step("Conv", image, filters)
    assert plain.key() == step("Conv", image, 2 * filters).key()
    assert plain.key() != step("Conv", image, filters, dilations=(2, 2)).key()
    assert plain.key() != step("Conv", image[:1], filters).key()
    low = np.array(0, np.float32)
    assert step("Clip", X, low).key() != step("Clip", X, None, low).key()

"""Plans: the memory plan on random lives, in-place use, parts, layouts, shapes by value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops, passes
from subgraph.engine.planner.layouts import block_lanes
from subgraph.engine.planner.lowering import Lowering, LoweringRule
from subgraph.engine.planner.memory import Life, Lives, assign_offsets, join_in_place
from subgraph.engine.planner.operands import EmittedStep, Operand, Storage
from subgraph.engine.planner.plan import make_plan
from subgraph.engine.planner.plan_types import Plan, PlanOptions, ReferenceStep, UnknownShapeError
from subgraph.graph.types import Array, TensorType


def plan_of(graph: sg.Graph, *types: tuple[str, tuple[int, ...]], **values: Array) -> Plan:
    graph = graph.clone()
    graph.inputs = tuple(v for v in graph.inputs if v.parameter is None)
    names = [v.name for v in graph.inputs]
    concrete = [TensorType(dtype, shape) for dtype, shape in types]
    known = {names.index(name): array for name, array in values.items()}
    return make_plan(graph, concrete, known, PlanOptions())


lives = st.lists(
    st.tuples(st.integers(1, 5000), st.integers(0, 30), st.integers(0, 12)), min_size=1, max_size=40
)


@given(lives, st.booleans())
@settings(max_examples=200, deadline=None)
def test_storages_that_live_together_do_not_overlap(
    specs: list[tuple[int, int, int]], by_time: bool
) -> None:
    storages = [
        (Storage("arena", size), Life(first, first + length)) for size, first, length in specs
    ]
    sizes, whole = [s.nbytes for s, _ in storages], [life for _, life in storages]
    if by_time:
        from subgraph.engine.planner import memory

        found, total = memory._first_fit_by_time(sizes, whole)  # pyright: ignore[reportPrivateUsage]
    else:
        found, total = assign_offsets(sizes, whole)
    offsets = {storage: at for (storage, _), at in zip(storages, found, strict=True)}
    for k, (a, life) in enumerate(storages):
        assert offsets[a] % 64 == 0
        assert offsets[a] + a.nbytes <= total
        for b, other in storages[:k]:
            if life.first <= other.last and other.first <= life.last:
                apart = offsets[a] + a.nbytes <= offsets[b] or offsets[b] + b.nbytes <= offsets[a]
                assert apart, (life, other)
    peak = max(
        sum(-(-s.nbytes // 64) * 64 for s, life in storages if life.first <= t <= life.last)
        for t in range(43)
    )
    assert total >= peak


def operand(nbytes: int) -> Operand:
    made = Operand("x", "uint8", (nbytes,))
    made.storage = Storage("arena", nbytes)
    return made


def test_an_output_overwrites_an_input_that_dies() -> None:
    x, y, z = operand(100), operand(100), operand(100)
    known = Lives()
    for storage, step in ((x, 0), (x, 1), (y, 1), (y, 2), (z, 2), (x, 2)):
        assert storage.storage is not None
        known.mention(storage.storage, step)
    # Step 1 makes y of x, but step 2 still reads x; step 2 makes z of y, which dies there.
    assert join_in_place([(y, x, 1), (z, y, 2)], known) == 1
    assert x.storage is not None
    assert y.storage is not None
    assert z.storage is not None
    assert y.storage.root()[0] is y.storage
    assert z.storage.root()[0] is y.storage


def test_an_output_that_is_larger_does_not_overwrite() -> None:
    x, y = operand(100), operand(101)
    known = Lives()
    for storage, step in ((x, 0), (x, 1), (y, 1)):
        assert storage.storage is not None
        known.mention(storage.storage, step)
    assert join_in_place([(y, x, 1)], known) == 0


def test_a_chain_in_place_needs_one_buffer() -> None:
    x = sg.input("x", (1 << 16,), "float32")
    y: Any = ops.Sigmoid(x)
    for _ in range(6):
        y = ops.Sigmoid(y)
    graph = sg.Graph([x], [y])
    plan = plan_of(graph, ("float32", (1 << 16,)))
    # All of it happens in the output's own memory; the input is the caller's and stays.
    assert plan.arena_bytes == 0
    assert plan.in_place == 6


def test_views_and_parts_move_nothing() -> None:
    x = sg.input("x", (1, 64, 8, 8), "float32")
    a, b = ops.Sigmoid(x), ops.Tanh(x)
    joined = ops.Concat(a, b, axis=1)
    flat = ops.Reshape(joined, sg.parameter("shape", np.array([1, -1])))
    graph = sg.Graph([x], [ops.Relu(flat)])
    plan = plan_of(graph, ("float32", (1, 64, 8, 8)))
    assert [step.node.op_type for step in plan.items] == ["Sigmoid", "Tanh", "Relu"]


def test_shapes_are_computed_while_planning() -> None:
    x = sg.input("x", ("N", "T", 12), "float32")
    n = ops.Gather(ops.Shape(x), sg.parameter("zero", np.array([0])))
    shape = ops.Concat(n, sg.parameter("rest", np.array([-1, 4])), axis=0)
    graph = sg.Graph([x], [ops.Relu(ops.Reshape(x, shape))])
    plan = plan_of(graph, ("float32", (3, 5, 12)))
    assert [step.node.op_type for step in plan.items] == ["Relu"]
    assert plan.outputs[0].shape == (3, 15, 4)
    assert {p.name for p, _ in plan.versions.read} == {"zero", "rest"}


def test_a_shape_that_is_the_content_of_an_input() -> None:
    x, shape = sg.input("x", (12,), "float32"), sg.input("shape", (2,), "int64")
    graph = sg.Graph([x, shape], [ops.Reshape(x, shape)])
    types = (("float32", (12,)), ("int64", (2,)))
    with pytest.raises(UnknownShapeError) as caught:
        plan_of(graph, *types)
    assert caught.value.inputs == (1,)
    assert plan_of(graph, *types, shape=np.array([3, -1])).outputs[0].shape == (3, 4)


def test_the_plan_for_other_values_of_a_shape() -> None:
    x, shape = sg.input("x", (12,), "float32"), sg.input("shape", (2,), "int64")
    model = sg.compile_model(sg.Graph([x, shape], [ops.Neg(ops.Reshape(x, shape))]), "CPU")
    data = np.arange(12, dtype=np.float32)
    for dims in ((3, 4), (2, 6), (3, 4), (12, 1)):
        np.testing.assert_array_equal(model([data, np.array(dims)])[0], -data.reshape(dims))


def test_layouts_are_converted_at_the_edges_only() -> None:
    x = sg.input("x", (1, 32, 9, 9), "float32")
    rng = np.random.default_rng(0)
    y: Any = x
    for k in range(3):
        w = sg.parameter(f"w{k}", rng.standard_normal((32, 32, 3, 3)).astype(np.float32))
        y = ops.Relu(ops.Conv(y, w, pads=[1, 1, 1, 1]))
    graph = sg.Graph([x], [y])
    plan = plan_of(graph, ("float32", (1, 32, 9, 9)))
    assert plan.reorders == (2 if any(o.layout == "blocked" for o in _all(plan)) else 0)


@pytest.mark.parametrize("first", ["Conv", ""])
def test_pooling_is_planned_in_the_layout_of_its_input(first: str) -> None:
    x = sg.input("x", (2, 24, 9, 11), "float32")
    w = sg.parameter("w", np.ones((24, 24, 1, 1), np.float32))
    y: Any = ops.MaxPool(ops.Conv(x, w) if first else x, kernel_shape=[3, 3], strides=[2, 2])
    plan = plan_of(sg.Graph([x], [y]), ("float32", (2, 24, 9, 11)))
    has_blocks = any(o.layout == "blocked" for o in _all(plan))
    assert has_blocks == (bool(first) and block_lanes("float32") > 1)
    assert plan.reorders == (2 if has_blocks else 0)


def _all(plan: Plan) -> list[Operand]:
    found = [
        word for step in plan.items if isinstance(step, EmittedStep) for word in step.arguments
    ]
    return [word for word in found if isinstance(word, Operand)]


def test_reference_steps_run_between_compiled_steps() -> None:
    x = sg.input("x", (4,), "float32")
    y = ops.Det(ops.Reshape(ops.Relu(x), sg.parameter("s", np.array([2, 2]))))
    plan = plan_of(sg.Graph([x], [ops.Neg(y)]), ("float32", (4,)))
    assert any(isinstance(step, ReferenceStep) and step.reason for step in plan.items)


@pytest.mark.parametrize(
    ("dtype", "shape"), [("float32", (1, 4)), ("float64", (3, 4)), ("float32", (4, 3))]
)
def test_a_reference_step_checks_the_results_for_which_memory_is_planned(
    dtype: str, shape: tuple[int, ...]
) -> None:
    def compute(node: sg.Node, inputs: Any) -> Any:
        return [np.ones(shape, dtype)]

    x = sg.input("x", (3, 4), "float32")
    node = sg.Node("Relu", [ops.Neg(x)])
    node.outputs[0].type = x.type
    plan = plan_of(sg.Graph([x], [node.outputs[0]]), ("float32", (3, 4)))
    operand = plan.outputs[0]
    step = ReferenceStep(node, (operand,), (operand,), "a test")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("subgraph.engine.planner.plan_types.evaluate", compute)
        with pytest.raises(sg.ShapeError, match=r"planned as float32\[3, 4\], but it is"):
            step.compute([np.ones((3, 4), np.float32)])


def test_a_range_whose_limits_are_computed_from_inputs_and_weights() -> None:
    size = sg.input("size", (), "int64")
    end = ops.Mul(ops.Cast(size, to=1), sg.parameter("factor", np.float32(2.0)))
    zero, step = (sg.parameter(n, np.float32(v)) for n, v in (("zero", 0.0), ("step", 1.0)))
    model = sg.compile_model(sg.Graph([size], [ops.Neg(ops.Range(zero, end, step))]), "CPU")
    for count in (3, 1, 5):
        got = model(np.array(count))[0]
        np.testing.assert_array_equal(got, -np.arange(2 * count, dtype=np.float32))
    model.parameters["factor"].assign(np.float32(3.0))
    np.testing.assert_array_equal(model(np.array(2))[0], -np.arange(6, dtype=np.float32))


def test_the_order_of_operands_needs_no_kernel_of_its_own() -> None:
    x, y = (sg.input(name, (3, 40), "float32") for name in "xy")
    w = sg.parameter("w", np.arange(40, dtype=np.float32))
    one = sg.Graph([x, y], [ops.Add(ops.Mul(x, w), y)])
    other = sg.Graph([x, y], [ops.Add(y, ops.Mul(w, x))])
    types = [("float32", (3, 40))] * 2
    kernels = []
    for graph in (one, other):
        fused = passes.apply_pass(graph, "CpuFusion")
        steps = [step for step in plan_of(fused, *types).items if isinstance(step, EmittedStep)]
        kernels.append([step.kernel for step in steps])
    assert kernels[0] == kernels[1]
    inputs = [np.random.default_rng(k).standard_normal((3, 40)).astype(np.float32) for k in (0, 1)]
    expected = inputs[0] * np.arange(40, dtype=np.float32) + inputs[1]
    for graph in (one, other):
        np.testing.assert_allclose(sg.compile_model(graph, "CPU")(inputs)[0], expected, rtol=1e-6)


def test_a_lowering_with_a_fault_refuses_the_node_and_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(node: sg.Node, low: Lowering) -> None:
        raise TypeError("planted")

    rule = LoweringRule(faulty, None, frozenset({"plain"}))
    monkeypatch.setattr(Lowering, "rule_of", lambda node: rule)
    x = sg.input("x", shape=(3,), dtype="float32")
    with caplog.at_level("INFO", "subgraph.engine"):
        plan = plan_of(sg.Graph([x], [ops.Tanh(x)]), ("float32", (3,)))
    [step] = plan.items
    assert isinstance(step, ReferenceStep)
    assert step.reason.startswith("its lowering failed: TypeError")
    [record] = [entry for entry in caplog.records if "lowering failed" in entry.message]
    assert "(Tanh)" in record.message
    assert record.exc_info is not None

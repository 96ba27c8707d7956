"""Which strategy serves a call of a region, and that a fallback is counted with its cause."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.engine.cpu.region_op import CpuSubgraphOp
from subgraph.engine.cpu.region_options import CpuRegionOptions
from subgraph.engine.region.region_op import without_weights
from subgraph.graph.types import Array

ONE_THREAD = {"INFERENCE_NUM_THREADS": 1}


def rows(count: int) -> Array:
    return np.arange(count * 4, dtype=np.float32).reshape(count, 4)


def doubled() -> sg.Graph:
    x = sg.input("x", ("n", 4), "float32")
    return sg.Graph([x], [ops.Relu(ops.Add(x, x))])


def counts(model: sg.CompiledModel) -> dict[str, Any]:
    (found,) = model.get_property("REGION_STRATEGIES").values()
    return found


def test_shapes_that_differ_are_served_by_a_symbolic_plan() -> None:
    model = sg.compile_model(doubled(), "CPU", ONE_THREAD)
    for count in (1, 2, 3, 4, 3, 3):
        np.testing.assert_array_equal(model(rows(count))[0], 2 * rows(count))
    chosen = counts(model)["chosen"]
    assert chosen["one plan"] == 1
    assert chosen["symbolic plan"] == 3
    # The executable plan of 3 rows was bound to 4 when they came back.
    assert chosen["known plan"] == 1
    assert sum(chosen.values()) == 5
    for count in (4, 3, 4, 3):
        np.testing.assert_array_equal(model(rows(count))[0], 2 * rows(count))
    assert sum(chosen.values()) == sum(counts(model)["chosen"].values()), (
        "a session does not ask again for shapes that alternate"
    )


def test_the_first_call_uses_the_plan_of_the_query() -> None:
    x = sg.input("x", (3, 4), "float32")
    model = sg.compile_model(sg.Graph([x], [ops.Exp(x)]), "CPU", ONE_THREAD)
    model(rows(3) / 9)
    assert counts(model)["chosen"] == {"plan of the dry run": 1}
    model.create_infer_request().infer([rows(3) / 9])
    assert counts(model)["chosen"] == {"plan of the dry run": 1, "known plan": 1}


@pytest.mark.plain_memory
def test_a_stored_program_serves_and_says_why_it_does_not() -> None:
    x, w = sg.input("x", ("n", 4), "float32"), sg.parameter("w", np.ones((4, 4), np.float32))
    first = sg.compile_model(sg.Graph([x], [ops.MatMul(x, w)]), "CPU", ONE_THREAD)
    first(rows(2))
    file = io.BytesIO()
    first.export_model(file)
    model = sg.default_core().import_model(file.getvalue(), "CPU", ONE_THREAD)
    model(rows(2))
    assert counts(model)["chosen"] == {"stored program": 1}
    model(rows(5))
    assert counts(model)["declined"]["stored program"] == {
        "the file has no program for these shapes": 1
    }
    model.parameters["w"].assign(np.full((4, 4), 2, np.float32))
    np.testing.assert_array_equal(model(rows(2))[0], rows(2) @ np.full((4, 4), 2, np.float32))
    causes = counts(model)["declined"]["stored program"]
    assert causes["weights have changed since the file was written"] == 1


def test_a_region_that_is_split_says_which_node_was_the_obstacle(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x = sg.input("x", ("n",), "float32")
    found = ops.Compress(x, ops.Greater(x, np.float32(0)), axis=0, name="pick")
    graph = sg.Graph([x], [ops.Exp(ops.Sub(found, np.float32(1)))])
    model = sg.compile_model(graph, "CPU", ONE_THREAD)
    data = np.array([-1, 2, 0, 3], np.float32)
    with caplog.at_level(logging.INFO, "subgraph.engine"):
        np.testing.assert_allclose(model(data)[0], np.exp(np.array([1, 2], np.float32)), rtol=1e-6)
    regions = model.get_property("REGION_STRATEGIES").values()
    split = [each for each in regions if "split plan" in each["chosen"]]
    assert split, list(regions)
    (cause,) = split[0]["declined"]["one plan"]
    assert "pick" in cause
    assert any(cause in record.getMessage() for record in caplog.records)
    assert all(part["chosen"] for part in split[0]["parts"])


def test_a_node_without_a_kernel_is_counted() -> None:
    x = sg.input("x", (2, 2), "float64")
    region = CpuSubgraphOp(
        sg.Graph([x], [ops.Det(ops.Neg(x))]), CpuRegionOptions(), without_weights
    )
    data = np.array([[1.0, 2.0], [4.0, 7.0]])
    np.testing.assert_allclose(region.forward([data])[0], np.linalg.det(-data))
    (cause,) = region.run_report()["declined"]["kernel"]
    assert cause.startswith("Det: ")


def test_a_node_without_a_kernel_reads_a_view_of_a_weight() -> None:
    ratio, matrix = sg.input("ratio", (), "float32"), np.array([[2, 1], [1, 3]], np.float32)
    same = ops.Dropout(sg.parameter("w", matrix), ratio)  # a view: nothing is dropped
    region = CpuSubgraphOp(sg.Graph([ratio], [ops.Det(same)]), CpuRegionOptions(), without_weights)
    np.testing.assert_allclose(region.forward([np.float32(0.5)])[0], 5)


def test_a_weight_passed_as_an_array_is_run_by_the_reference_and_counted() -> None:
    x, w = sg.input("x", (2,), "float32"), sg.parameter("w", np.ones(2, np.float32))
    weight = sg.input("v", (2,), "float32")
    weight.parameter = w.parameter
    region = CpuSubgraphOp(
        sg.Graph([x, weight], [ops.Add(x, weight)]), CpuRegionOptions(), without_weights
    )
    one = np.ones(2, np.float32)
    np.testing.assert_array_equal(region.session()([one, 3 * one])[0], 4 * one)
    report = region.run_report()
    assert report["chosen"] == {"reference": 1}
    assert report["declined"]["all strategies"] == {
        "a weight was replaced by another array in this run": 1
    }


def loop(body: sg.Graph) -> sg.CompiledModel:
    x, count = sg.input("x", ("k",), "float32"), sg.input("m", (), "int64")
    graph = sg.Graph([x, count], [ops.Loop(count, np.bool_(True), x, body=body)])
    return sg.compile_model(graph, "CPU", ONE_THREAD)


def loop_body(result: Callable[[sg.Value], sg.Value]) -> sg.Graph:
    number, going = sg.input("i", (), "int64"), sg.input("c", (), "bool")
    state = sg.input("s", ("k",), "float32")
    return sg.Graph([number, going, state], [ops.Identity(going), result(state)], "body")


def test_a_loop_of_one_size_is_compiled() -> None:
    model = loop(loop_body(lambda state: ops.Mul(state, np.float32(2))))
    result = model([np.ones(4, np.float32), np.array(5)])[0]
    np.testing.assert_array_equal(result, np.full(4, 32, np.float32))
    assert counts(model)["chosen"]["compiled loop"] == 1
    assert "compiled loop" not in counts(model)["declined"]


def test_a_loop_whose_state_grows_says_why_it_is_not_compiled() -> None:
    model = loop(loop_body(lambda state: ops.Concat(state, state, axis=0)))
    result = model([np.ones(1, np.float32), np.array(3)])[0]
    np.testing.assert_array_equal(result, np.ones(8, np.float32))
    causes = counts(model)["declined"]["compiled loop"]
    assert list(causes) == ["a value has another size in the next iteration"]


def test_an_input_without_a_stated_type_has_plans_for_each_dtype() -> None:
    x = sg.Value("x")  # the result of an operator whose types are not known
    region = CpuSubgraphOp(sg.Graph([x], [ops.Neg(x)]), CpuRegionOptions(), without_weights)
    session = region.session()
    for size in (4, 20_000):  # copied to memory of the plan, and read where it is
        for dtype in ("float32", "float64", "int8", "float32", "int8"):
            data = np.arange(size).astype(dtype)
            (result,) = session([data])
            assert result.dtype == dtype
            np.testing.assert_array_equal(result, -data)

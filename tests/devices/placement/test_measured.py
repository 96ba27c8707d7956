"""Placement by measured times: regions, whole runs, the table of who runs what, and AUTO."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.devices.placement.profiles import (
    MIXED,
    Profile,
    measure,
    read_profile,
    sample_inputs,
    seconds_of_runs,
    write_profile,
)
from subgraph.devices.placement.regions import divide, with_regions
from tests.support.simulated_device import Simulated

X = np.linspace(-2, 2, 8, dtype=np.float32).reshape(1, 8)
FAST, SLOW = 2e-4, 1e-2  # seconds of an operator; far more than calls and noise take


class Sleeping(Simulated):
    """A device whose regions take the times of their operators, and an extra time for each run."""

    def __init__(self, seconds: Mapping[str, float], extra: float = 0.0) -> None:
        super().__init__(set(seconds))
        self.seconds, self.extra = seconds, extra

    def create_op(self, graph: sg.Graph, options: Any) -> sg.SubgraphOp:
        total = self.extra + sum(self.seconds[node.op_type] for node in graph.nodes)
        op = super().create_op(graph, options)
        return SleepingOp(graph, op, total)


class SleepingOp(sg.SubgraphOp):
    def __init__(self, graph: sg.Graph, inner: sg.SubgraphOp, seconds: float) -> None:
        super().__init__(graph)
        self.inner, self.seconds = inner, seconds

    def forward(self, inputs: Any) -> Any:
        time.sleep(self.seconds)
        return self.inner.session()(inputs)


def dense() -> sg.Graph:
    """Return MatMul - Sigmoid - MatMul: its regions are the two products, with what follows."""
    rng = np.random.default_rng(0)
    x = sg.input("x", type=sg.TensorType("float32", (1, 8)))
    first = sg.parameter("first", rng.standard_normal((8, 8)).astype(np.float32))
    last = sg.parameter("last", rng.standard_normal((8, 8)).astype(np.float32))
    hidden = ops.Sigmoid(ops.MatMul(x, first, name="one"), name="sig")
    return sg.Graph([x], [ops.Relu(ops.MatMul(hidden, last, name="two"), name="end")], "dense")


def core_with(**devices: Simulated) -> sg.Core:
    core = sg.Core()
    for name, device in devices.items():
        core.register_device(name, device)
    return core


def two_strengths(extra: float = 0.0) -> sg.Core:
    """Return a Core whose device A is fast with sigmoids, and B with Relu."""
    a = Sleeping({"MatMul": FAST, "Sigmoid": FAST, "Relu": SLOW}, extra)
    b = Sleeping({"MatMul": FAST, "Sigmoid": SLOW, "Relu": FAST})
    return core_with(A=a, B=b)


def by_region(table: Any) -> dict[str, str]:
    return {row["region"]: row["device"] for row in table["regions"]}


def reference(graph: sg.Graph) -> Any:
    return sg.compile_model(graph, "REFERENCE")(X)[0]


@pytest.mark.parametrize("device", ["AUTO:A,B", "HETERO:A,B"])
def test_each_region_runs_where_it_is_fastest(device: str) -> None:
    core = two_strengths()
    model = core.compile_model(dense(), device, {"PLACEMENT": "COST"})
    table = model.get_property("PLACEMENT_TABLE")
    assert by_region(table) == {"one to sig": "A", "two to end": "B"}
    assert table["alone"] == ""
    assert table["runs"][MIXED] < 0.7 * min(table["runs"]["A"], table["runs"]["B"])
    first, last = table["regions"]
    assert set(first["seconds"]) == {"A", "B"}
    assert (first["transfer_bytes"], last["transfer_bytes"]) == (0, 32)
    assert first["reason"] == last["reason"] == "fastest"
    assert "one to sig" in str(table)
    assert sorted(model.execution_devices) == ["A", "B"]
    np.testing.assert_allclose(model(X)[0], reference(dense()), atol=1e-6)


@pytest.mark.parametrize("device", ["AUTO:A,B", "HETERO:A,B"])
def test_one_device_runs_all_if_that_is_faster_than_the_sum_of_regions_says(device: str) -> None:
    """B runs the second half faster alone, but not beside A, whose runs begin with a long wait."""

    class Fusing(Sleeping):
        """Runs the whole model faster than its regions."""

        def create_op(self, graph: sg.Graph, options: Any) -> sg.SubgraphOp:
            op = super().create_op(graph, options)
            assert isinstance(op, SleepingOp)
            if len(graph.nodes) == 4:
                op.seconds = FAST
            return op

    a = Fusing({"MatMul": SLOW, "Sigmoid": FAST, "Relu": FAST})
    b = Sleeping({"MatMul": FAST, "Sigmoid": SLOW, "Relu": FAST})
    core = core_with(A=a, B=b)
    model = core.compile_model(dense(), device, {"PLACEMENT": "COST"})
    table = model.get_property("PLACEMENT_TABLE")
    assert table["alone"] == "A"
    assert set(by_region(table).values()) == {"A"}
    assert model.execution_devices == ["A"]
    assert {row["reason"] for row in table["regions"]} == {"a run on it alone is the fastest"}


class Timed:
    """A model whose runs take the given seconds, one after the other, and then the last."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)

    def create_infer_request(self) -> Timed:
        return self

    def infer(self, inputs: Any) -> None:
        time.sleep(self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0])


def test_one_quiet_moment_does_not_make_a_mixed_placement_the_fastest() -> None:
    """On a busy machine ResNet-50 ran 3 % slower on two devices than on CPU alone."""
    lucky: dict[str, Any] = {"A": Timed(0.02), MIXED: Timed(0.02, 0.01, 0.025)}
    times = seconds_of_runs(lucky, {})
    assert times[MIXED] > times["A"]
    faster: dict[str, Any] = {"A": Timed(0.02), MIXED: Timed(0.012)}
    times = seconds_of_runs(faster, {})
    assert times[MIXED] < 0.9 * times["A"]


def test_a_transfer_that_costs_more_than_it_saves_is_named() -> None:
    core = two_strengths()
    config = {"PLACEMENT": "COST", "TRANSFER_LATENCY": 1.0}
    model = core.compile_model(dense(), "HETERO:A,B", config)
    rows = model.get_property("PLACEMENT_TABLE")["regions"]
    assert len({row["device"] for row in rows}) == 1
    assert sum("transfers cost more" in row["reason"] for row in rows) == 1


def test_times_are_measured_once_and_read_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    config = {"PLACEMENT": "COST", "PROFILE": str(path)}
    core = two_strengths()
    core.compile_model(dense(), "AUTO:A,B", config)
    written = read_profile(path)
    assert set(written.runs) == {"A", "B", MIXED}
    assert written.regions == {"one to sig": ["one", "sig"], "two to end": ["two", "end"]}
    again = two_strengths()
    found = again.query_model(dense(), "AUTO:A,B", config)
    assert found == {"one": "A", "sig": "A", "two": "B", "end": "B"}
    assert again.query_model(dense(), "HETERO:A,B", config) == found
    for name in ("A", "B"):
        device = again.device(name)
        assert isinstance(device, Simulated)
        assert device.compiled == []


def test_a_profile_of_regions_places_their_nodes(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    regions = {"front": ["one", "sig"], "elsewhere": ["two", "no_such_node"]}
    times = {
        "A": {"front": 1.0, "two": 2.0, "end": 1.0},
        "B": {"front": 2.0, "two": 1.0, "end": 1.0},
    }
    write_profile(path, Profile(times, regions=regions))
    config = {"PLACEMENT": "COST", "PROFILE": str(path)}
    found = two_strengths().query_model(dense(), "HETERO:A,B", config)
    assert found == {"one": "A", "sig": "A", "two": "B", "end": "B"}


def test_times_of_another_model_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    write_profile(path, Profile({"A": {"nowhere": 1.0}, "B": {"nowhere": 2.0}}))
    config = {"PLACEMENT": "COST", "PROFILE": str(path)}
    with pytest.raises(sg.ConfigError, match=r"times are of another model.*'dense'"):
        two_strengths().compile_model(dense(), "AUTO:A,B", config)


def test_the_table_is_exported_with_the_model(tmp_path: Path) -> None:
    core = two_strengths()
    model = core.compile_model(dense(), "HETERO:A,B", {"PLACEMENT": "COST"})
    model.export_model(tmp_path / "model.sgb")
    again = core.import_model(tmp_path / "model.sgb")
    table = model.get_property("PLACEMENT_TABLE")
    assert again.get_property("PLACEMENT_TABLE") == table
    assert str(again.get_property("PLACEMENT_TABLE")) == str(table)


def test_options_of_devices_hold_while_they_are_measured() -> None:
    core = two_strengths()
    core.compile_model(dense(), "AUTO:A,B", {"PLACEMENT": "COST", "A": {"KNOB": 5}})
    device = core.device("A")
    assert isinstance(device, Simulated)
    assert set(device.knobs) == {5}


def test_an_input_without_type_cannot_be_measured() -> None:
    x = sg.input("x")
    graph = sg.Graph([x], [ops.Relu(x)], "unknown")
    with pytest.raises(sg.DeviceError, match=r"input 'x' is float32\[\*\].*PROFILE"):
        two_strengths().compile_model(graph, "AUTO:A,B", {"PLACEMENT": "COST"})


def test_inputs_for_a_measurement() -> None:
    x = sg.input("x", type=sg.TensorType("float32", ("N", 3)))
    k = sg.input("k", type=sg.TensorType("int64", (2,)))
    graph = sg.Graph([x, k], [ops.Relu(x), ops.Neg(k)], "two_inputs")
    found = sample_inputs(graph)
    assert found["x"].shape == (1, 3)
    assert found["x"].dtype == np.float32
    assert found["k"].tolist() == [0, 0]


def residual_blocks(count: int) -> sg.Graph:
    rng = np.random.default_rng(0)
    y = x = sg.input("x", type=sg.TensorType("float32", (512, 8)))
    for k in range(count):
        w = sg.parameter(f"w{k}", rng.standard_normal((8, 8)).astype(np.float32) / 3)
        y = ops.Add(y, ops.Relu(ops.MatMul(ops.Relu(y), w, name=f"mm{k}")), name=f"add{k}")
    return sg.Graph([x], [y], "blocks")


def test_regions_cover_the_graph_once_and_end_where_one_value_leaves() -> None:
    graph = sg.passes.apply_pass(residual_blocks(60), "InferTypes")
    names = [node.name for node in graph.nodes]
    regions = divide(graph, {"A": names, "B": names[:100]})
    assert sorted(name for region in regions.values() for name in region) == sorted(names)
    assert 20 <= len(regions) <= 26
    assert any(names[99] in region and names[100] not in region for region in regions.values())
    cut = with_regions(graph, regions)
    assert len(cut.nodes) == len(regions)
    x = np.random.default_rng(1).standard_normal((512, 8)).astype(np.float32)
    want = sg.compile_model(graph, "REFERENCE")(x)[0]
    np.testing.assert_array_equal(sg.compile_model(cut, "REFERENCE")(x)[0], want)


def test_devices_of_few_nodes_do_not_divide_the_graph_for_all() -> None:
    graph = sg.passes.apply_pass(residual_blocks(60), "InferTypes")
    names = [node.name for node in graph.nodes]
    relus = [node.name for node in graph.nodes if node.op_type == "Relu"]
    regions = divide(graph, {"A": relus, "B": names})
    assert len(regions) <= 26


def test_quantised_operators_stay_with_their_conversions() -> None:
    scale = sg.parameter("scale", np.float32(0.1))
    zero = sg.parameter("zero", np.uint8(128))
    rng = np.random.default_rng(0)
    y = x = sg.input("x", type=sg.TensorType("uint8", (4, 8)))
    for k in range(4):
        w = sg.parameter(f"w{k}", rng.integers(0, 255, (8, 8)).astype(np.uint8))
        wide = ops.DequantizeLinear(w, scale, zero, name=f"weight{k}")
        product = ops.MatMul(ops.DequantizeLinear(y, scale, zero, name=f"from{k}"), wide)
        y = ops.QuantizeLinear(product, scale, zero, name=f"to{k}")
    graph = sg.passes.apply_pass(sg.Graph([x], [y], "quantised"), "InferTypes")
    regions = divide(graph, {"A": [node.name for node in graph.nodes]})
    assert len(regions) == 4
    for k, region in enumerate(regions.values()):
        assert {f"weight{k}", f"from{k}", f"to{k}"} <= set(region)


def test_a_region_that_fails_alone_has_no_time() -> None:
    core = two_strengths()
    a = core.device("A")
    assert isinstance(a, Simulated)
    a.lost = True
    profile = measure(dense(), [a, core.device("B")], {"x": X}, repeats=1)
    assert profile.times["A"] == {}
    assert set(profile.times["B"]) == {"one to sig", "two to end"}

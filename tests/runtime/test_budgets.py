"""Budgets: small files that ask for much memory, many nodes or much work are refused at once.

What these files asked for took minutes or tens of gigabytes; the bounds of time here are generous.
"""

from __future__ import annotations

import io
import itertools
import locale
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import subgraph as sg
from subgraph import ops
from subgraph.engine.planner import plan
from subgraph.engine.toolchain import compiler, toolchain
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.engine.toolchain.loader import KernelError
from subgraph.graph import limits
from subgraph.system import host
from tests.support.budgets import model_bytes, peak_below, tensor_info, within
from tests.support.opencl import needs_device

DEVICES = ["REFERENCE", "CPU"]
_FLOAT, _INT, _BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


# ------------------------------------------------------------------ nodes and names


def _bomb(levels: int) -> bytes:
    """Return a file whose functions call each other twice on each level."""
    functions: list[onnx.FunctionProto] = []
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
    for level in range(levels):
        last = level == levels - 1
        callee, domain = ("Relu", "") if last else (f"f{level + 1}", "own")
        nodes = [
            helper.make_node(callee, ["x"], ["t"], domain=domain),
            helper.make_node(callee, ["t"], ["y"], domain=domain),
        ]
        functions.append(
            helper.make_function("own", f"f{level}", ["x"], ["y"], nodes, opset_imports=opsets)
        )
    node = helper.make_node("f0", ["x"], ["y"], domain="own")
    return model_bytes(
        [node], [tensor_info("x", [4])], [tensor_info("y", [4])], functions=functions
    )


def test_functions_that_give_too_many_nodes_are_refused_before_they_are_expanded() -> None:
    content = _bomb(19)
    assert len(content) < 2000
    with within(10), pytest.raises(sg.LimitError, match="gives 524288 nodes"):
        sg.load(content)


def test_functions_within_the_budget_are_expanded() -> None:
    assert len(sg.load(_bomb(5)).nodes) == 2**5


def test_nodes_of_one_name_take_linear_time() -> None:
    count = 16_000
    nodes = [helper.make_node("Relu", [f"v{k}"], [f"v{k + 1}"], name="same") for k in range(count)]
    with within(20):
        graph = sg.load(
            model_bytes(nodes, [tensor_info("v0", [4])], [tensor_info(f"v{count}", [4])])
        )
    assert [node.name for node in graph.nodes[:3]] == ["same", "same_1", "same_2"]
    assert len({node.name for node in graph.nodes}) == count


def test_outputs_that_all_change_take_linear_time() -> None:
    x = sg.input("x", (4,))
    graph = sg.Graph([x], [ops.Relu(x) for _ in range(40_000)])
    with within(20):
        graph.rewire({old: ops.Neg(x) for old in graph.outputs})
    assert {node.op_type for node in graph.nodes} == {"Neg"}


def test_a_graph_knows_its_outputs() -> None:
    x = sg.input("x", (4,))
    inner, other = ops.Relu(x), ops.Neg(x)
    y = ops.Abs(inner)
    graph = sg.Graph([x], [y])
    assert [graph.is_output(value) for value in (x, inner, other, y)] == [False, False, False, True]
    graph.rewire({y: other})
    assert [graph.is_output(value) for value in (x, inner, other, y)] == [False, False, True, False]


# ------------------------------------------------------------------ counts in attributes


@pytest.mark.parametrize("device", DEVICES)
def test_a_gram_length_beyond_every_row_costs_nothing(device: str) -> None:
    node = helper.make_node(
        "TfIdfVectorizer",
        ["x"],
        ["y"],
        min_gram_length=1,
        max_gram_length=10**9,
        max_skip_count=10**9,
        mode="TF",
        ngram_counts=[0],
        ngram_indexes=[0, 1],
        pool_int64s=[1, 2],
    )
    content = model_bytes([node], [tensor_info("x", [8], _INT)], [tensor_info("y", [2])])
    with within(20):
        assert sg.compile_model(content, device)([np.arange(8)])[0].tolist() == [1, 1]


@pytest.mark.parametrize("count", [10**9, 2, 0, -1])
def test_a_scan_of_more_inputs_than_it_has_is_refused(count: int) -> None:
    body = helper.make_graph(
        [helper.make_node("Identity", ["a"], ["b"])],
        "body",
        [tensor_info("a", [1])],
        [tensor_info("b", [1])],
    )
    node = helper.make_node("Scan", ["x"], ["y"], body=body, num_scan_inputs=count)
    content = model_bytes([node], [tensor_info("x", [4, 1])], [tensor_info("y", [4, 1])])
    with peak_below(50 << 20), pytest.raises(sg.ModelError, match="num_scan_inputs"):
        sg.load(content)


# ------------------------------------------------------------------ memory of a whole run


def _many_constants(count: int, elements: int) -> bytes:
    nodes = [helper.make_node("ConstantOfShape", ["s"], [f"y{k}"]) for k in range(count)]
    weight = helper.make_tensor("s", _INT, [1], [elements])
    outputs = [tensor_info(f"y{k}", None) for k in range(count)]
    return model_bytes(nodes, [], outputs, [weight])


@pytest.mark.parametrize("device", DEVICES)
def test_values_that_fit_alone_and_not_together_are_refused(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(limits.MEMORY_LIMIT.name, "64M")
    model = sg.compile_model(_many_constants(8, 4 << 20), device)  # 16 MiB each
    with peak_below(100 << 20), pytest.raises(sg.LimitError, match="budget is 64"):
        model()


@pytest.mark.parametrize("device", DEVICES)
def test_whoever_goes_on_after_a_refusal_is_refused_again(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values below 1/16 of the budget were counted anew only after as many bytes as before."""
    monkeypatch.setenv(limits.MEMORY_LIMIT.name, "64M")
    with peak_below(100 << 20), pytest.raises(sg.LimitError, match="budget is 64"):
        sg.compile_model(_many_constants(300, 1 << 18), device)()  # 1 MiB each


def test_constants_of_a_plan_are_limited_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(limits.MEMORY_LIMIT.name, "64M")
    monkeypatch.setattr(plan, "_MAX_ALL_FOLDED_BYTES", 8 << 20)
    with peak_below(20 << 20), pytest.raises(sg.LimitError, match="live at the same time"):
        sg.compile_model(_many_constants(100, 1 << 18), "CPU")()


def test_a_region_counts_what_the_regions_before_it_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each region's plan fitted alone, and half of the values were made before it was refused."""
    monkeypatch.setenv(limits.MEMORY_LIMIT.name, "64M")
    count = 3 << 18  # 3 MiB; y has 24, z 48
    graph = sg.load(
        model_bytes(
            [
                helper.make_node("Concat", ["x"] * 8, ["y"], name="first", axis=0),
                helper.make_node("Concat", ["y", "y"], ["z"], name="second", axis=0),
            ],
            [tensor_info("x", [count])],
            [tensor_info("y", [8 * count]), tensor_info("z", [16 * count])],
        )
    )
    for name, device in (("first", "REFERENCE"), ("second", "CPU")):
        graph.node(name).metadata = {"affinity": device}
    model = sg.compile_model(graph, "HETERO:CPU,REFERENCE")
    x = np.ones(count, np.float32)
    with peak_below(50 << 20), pytest.raises(sg.LimitError, match=r"48.00 MiB beside the 27"):
        model(x=x)


_FAR = 1 << 29
WITHOUT_ELEMENTS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "Conv": ((0, 1, 4), {"pads": [_FAR, _FAR]}),
    "ConvTranspose": ((0, 1, 4), {"strides": [_FAR]}),
    "AveragePool": ((0, 1, 4), {"kernel_shape": [_FAR], "pads": [_FAR // 2, _FAR // 2]}),
    "Expand": ((0, 1), {}),
    "OneHot": ((0,), {}),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op_type", WITHOUT_ELEMENTS)
def test_a_result_without_elements_takes_no_memory(op_type: str, device: str) -> None:
    """onnx.reference took memory of its other dimensions, gigabytes for a batch of 0."""
    shape, attributes = WITHOUT_ELEMENTS[op_type]
    x = sg.input("x", [f"d{k}" for k in range(len(shape))], "float32")
    more: list[Any] = [np.ones((1, 1, 1), np.float32)] if op_type.startswith("Conv") else []
    if op_type == "Expand":
        more = [np.array([1, _FAR])]
    data = np.zeros(shape, np.float32)
    if op_type == "OneHot":
        x, data = sg.input("x", ("N",), "int64"), np.zeros(shape, np.int64)
        more = [np.array(_FAR), np.array([0, 1], np.float32)]
    node = getattr(ops, op_type)(x, *more, **attributes)
    model = sg.compile_model(sg.Graph([x], [node]), device)
    with peak_below(50 << 20):
        assert model(data)[0].size == 0


def _table_graph(op_type: str, size: int) -> sg.Graph:
    """Return a graph of a node whose kernel reads a table of more bytes than its result has."""
    if op_type == "AffineGrid":
        theta = sg.input("x", (1, 2, 3))
        return sg.Graph([theta], [ops.AffineGrid(theta, np.array([1, 1, 1, size]))])
    x = sg.input("x", (4,), "uint8")
    if op_type == "Pad":
        return sg.Graph([x], [ops.Pad(x, np.array([0, size - 4]), mode="reflect")])
    sizes = np.array([size])
    return sg.Graph([x], [ops.Resize(x, None, None, sizes, mode=op_type.split()[1])])


@pytest.mark.parametrize("op_type", ["Resize nearest", "Resize linear", "Pad", "AffineGrid"])
def test_tables_of_kernels_count(op_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result of 24 MiB fitted into a budget of 64; the table took 40 times its elements."""
    monkeypatch.setenv(limits.MEMORY_LIMIT.name, "64M")
    graph = _table_graph(op_type, 3 << 20 if op_type == "AffineGrid" else 24 << 20)
    x: Any = np.ones(4, np.uint8)
    if op_type == "AffineGrid":
        x = np.ones((1, 2, 3), np.float32)
    with peak_below(100 << 20), pytest.raises(sg.LimitError):
        sg.compile_model(graph, "CPU")(x)


@pytest.mark.plain_memory
@pytest.mark.parametrize("device", DEVICES)
def test_values_that_die_in_between_do_not_count(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(limits.MEMORY_LIMIT.name, "64M")
    x = sg.input("x", ("N",))
    y = x
    for _ in range(16):
        y = sg.ops.CumSum(sg.ops.Abs(y), np.array(0))
    model = sg.compile_model(sg.Graph([x], [y]), device)
    assert model(np.zeros(2 << 20, np.float32))[0].shape == (2 << 20,)


@pytest.mark.parametrize("device", DEVICES)
def test_a_sequence_that_grows_is_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(limits.MEMORY_LIMIT.name, "16M")
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["on"]),
            helper.make_node("Expand", ["x", "size"], ["row"]),
            helper.make_node("SequenceInsert", ["s", "row"], ["more"]),
        ],
        "body",
        [
            tensor_info("i", [], _INT),
            tensor_info("go", [], _BOOL),
            helper.make_tensor_sequence_value_info("s", _FLOAT, None),
        ],
        [
            tensor_info("on", [], _BOOL),
            helper.make_tensor_sequence_value_info("more", _FLOAT, None),
        ],
    )
    nodes = [
        helper.make_node("SequenceEmpty", [], ["empty"]),
        helper.make_node("Loop", ["count", "", "empty"], ["items"], body=body),
        helper.make_node("ConcatFromSequence", ["items"], ["y"], axis=0),
    ]
    weights = [
        helper.make_tensor("count", _INT, [], [1 << 40]),
        helper.make_tensor("size", _INT, [1], [1 << 16]),
    ]
    content = model_bytes(nodes, [tensor_info("x", [1])], [tensor_info("y", None)], weights)
    model = sg.compile_model(content, device)
    with peak_below(100 << 20), within(60), pytest.raises(sg.LimitError, match="budget"):
        model(np.ones(1, np.float32))


@pytest.mark.parametrize("device", DEVICES)
def test_a_text_that_doubles_is_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(limits.MEMORY_LIMIT.name, "16M")
    names = [f"v{k}" for k in range(41)]
    nodes = [helper.make_node("StringConcat", [a, a], [b]) for a, b in itertools.pairwise(names)]
    text = TensorProto.STRING
    content = model_bytes(
        nodes, [tensor_info("v0", [1], text)], [tensor_info(names[-1], [1], text)]
    )
    model = sg.compile_model(content, device)
    with peak_below(100 << 20), pytest.raises(sg.LimitError, match="budget"):
        model(np.array(["ab"], dtype=object))


def test_one_long_text_among_many_short_ones_takes_the_memory_of_its_own() -> None:
    texts = np.array(["long " * 100_000, *["short"] * 2000], dtype=object)
    x = sg.input("x", ("N",), "string")
    added, upper = sg.ops.StringConcat(x, x), sg.ops.StringNormalizer(x, case_change_action="UPPER")
    with peak_below(50 << 20):
        found = sg.compile_model(sg.Graph([x], [added, upper]), "REFERENCE")(texts)
    assert [len(item) for item in found[0][:2]] == [1_000_000, 10]
    assert found[1][1] == "SHORT"


def test_many_texts_beside_one_of_many_parts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(limits.MEMORY_LIMIT.name, "256M")
    x = sg.input("x", ("N",), "string")
    model = sg.compile_model(sg.Graph([x], list(sg.ops.StringSplit(x))), "REFERENCE")
    assert model(np.array(["a b", "c"], dtype=object))[0].tolist() == [["a", "b"], ["c", ""]]
    with peak_below(100 << 20), pytest.raises(sg.LimitError, match="parts"):
        model(np.array(["a " * 100_000, *["b"] * 1000], dtype=object))


def test_a_model_does_not_set_the_locale_of_the_process() -> None:
    before = locale.setlocale(locale.LC_ALL)
    x = sg.input("x", ("N",), "string")
    graph = sg.Graph([x], [sg.ops.StringNormalizer(x, locale="C.UTF-8")])
    sg.compile_model(graph, "REFERENCE")(np.array(["a"], dtype=object))
    assert locale.setlocale(locale.LC_ALL) == before


# ------------------------------------------------------------------ how they are set


@pytest.mark.parametrize(
    ("text", "count"),
    [("1000", 1000), ("2K", 2048), ("1.5m", 3 << 19), ("8G", 8 << 30), (" 1 TiB ", 1 << 40)],
)
def test_a_budget_has_a_unit(text: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(limits.MEMORY_LIMIT.name, text)
    assert limits.memory_limit() == count


@pytest.mark.parametrize("text", ["a lot", "-1", "0", "8X", "nan", "1e9", "8 G G", "0.1"])
def test_a_budget_that_is_no_size_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(limits.MEMORY_LIMIT.name, text)
    with pytest.raises(sg.ConfigError, match=limits.MEMORY_LIMIT.name):
        limits.memory_limit()


def test_by_default_half_of_the_memory_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(limits.MEMORY_LIMIT.name, raising=False)
    assert limits.memory_limit() == limits.machine_memory() // 2


def test_what_exceeds_a_budget_is_a_memory_error_too() -> None:
    assert issubclass(sg.LimitError, (sg.SubgraphError, MemoryError))
    assert issubclass(sg.LimitError, ValueError)


def _growing() -> sg.Graph:
    x, shape = sg.input("x", (1,)), sg.input("shape", (1,), "int64")
    return sg.Graph([x, shape], [sg.ops.CumSum(sg.ops.Expand(x, shape), np.array(0))])


@pytest.mark.parametrize("device", [*DEVICES, "AUTO", "HETERO:CPU,REFERENCE", "MULTI:CPU"])
def test_an_option_of_a_model_limits_its_runs(device: str) -> None:
    model = sg.compile_model(_growing(), device, {"MEMORY_LIMIT": "1M"})
    one = np.ones(1, np.float32)
    assert model(one, np.array([8]))[0].shape == (8,)
    with pytest.raises(sg.LimitError, match=r"budget is 1\.00 MiB"):
        model(one, np.array([1 << 20]))
    request = model.create_infer_request()
    request.start_async([one, np.array([1 << 20])])
    with pytest.raises(sg.LimitError, match="budget"):
        request.wait(60)
    other = sg.compile_model(_growing(), device)
    assert other(one, np.array([1 << 20]))[0].shape == (1 << 20,)


@needs_device
def test_an_option_of_a_model_limits_each_stage_of_an_asynchronous_run() -> None:
    """OPENCL enqueues a run in a stage of its own, which knew no budget."""
    x = sg.input("x", ("N",))
    graph = sg.Graph([x], [ops.Relu(ops.Neg(x))])
    model = sg.compile_model(graph, "OPENCL", {"MEMORY_LIMIT": "1M"})
    request = model.create_infer_request()
    request.start_async([np.zeros(1 << 10, np.float32)])
    request.wait()
    request.start_async([np.zeros(1 << 20, np.float32)])
    with pytest.raises(sg.LimitError):
        request.wait()


def test_an_option_that_is_no_size_is_refused() -> None:
    core = sg.Core()
    with pytest.raises(sg.ConfigError, match="MEMORY_LIMIT"):
        core.set_property("CPU", {"MEMORY_LIMIT": "much"})
    with pytest.raises(sg.ConfigError, match="MEMORY_LIMIT"):
        core.compile_model(_growing(), "CPU", {"MEMORY_LIMIT": "much"})
    with pytest.raises(sg.ConfigError, match="memory_limit"):
        sg.load(_bomb(2), memory_limit="much")


def test_nodes_of_a_load_and_of_a_compilation_are_limited() -> None:
    with pytest.raises(sg.LimitError, match="budget is 31"):
        sg.load(_bomb(5), node_limit=31)
    with pytest.raises(sg.LimitError, match="budget is 31"):
        sg.compile_model(_bomb(5), "CPU", {"NODE_LIMIT": 31})
    assert len(sg.load(_bomb(5), node_limit=32).nodes) == 32


@pytest.mark.parametrize("device", DEVICES)
def test_time_of_a_load_and_of_a_compilation_is_limited(device: str) -> None:
    content = _bomb(8)
    with pytest.raises(sg.LimitError, match="time of 1e-09 s is over"):
        sg.load(content, timeout=1e-9)
    with pytest.raises(sg.LimitError, match="time of 1e-09 s is over"):
        sg.compile_model(content, device, {"COMPILE_TIMEOUT": 1e-9})
    sg.compile_model(content, device, {"COMPILE_TIMEOUT": 0})


def test_time_over_between_two_nodes_is_noticed() -> None:
    with limits.limited(seconds=1e-9), pytest.raises(sg.LimitError, match="trying node"):
        sg.compile_model(_growing(), "CPU", {"FUSION": False})


def _clock(step: float) -> Any:
    """Return a stand-in for the module ``time`` whose clock goes on by ``step`` at every look."""
    ticks = itertools.count(0.0, step)
    return SimpleNamespace(monotonic=lambda: next(ticks))


@pytest.mark.parametrize("device", ["CPU", "OPENCL", "HETERO:CPU,REFERENCE"])
def test_time_of_plans_for_new_shapes_is_limited(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = sg.input("x", ("N", 4))
    graph = sg.Graph([x], [ops.Add(ops.Softmax(ops.Relu(x)), x)])
    model = sg.compile_model(graph, device, {"COMPILE_TIMEOUT": 60})
    given = np.ones((5, 4), np.float32)  # no size with which a query tries the nodes
    for _ in range(2):
        with monkeypatch.context() as own:
            own.setattr(limits, "time", _clock(100.0))
            with pytest.raises(sg.LimitError, match="time of 60 s is over"):
                model(given)
    np.testing.assert_allclose(model(given)[0], np.full((5, 4), 1.25), rtol=1e-6)
    with monkeypatch.context() as own:
        own.setattr(limits, "time", _clock(100.0))
        assert model(given)[0].shape == (5, 4), "what is planned needs no time"


@pytest.mark.parametrize("device", ["CPU", "OPENCL"])
@pytest.mark.parametrize("rows", [5, "N"])
def test_time_over_in_an_export_leaves_nothing_half_made(
    rows: int | str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export plans ahead and goes on where that fails: nothing of it may stay half made."""
    x = sg.input("x", (rows, 4))
    weight = sg.parameter("w", np.eye(4, dtype=np.float32))
    graph = sg.Graph([x], [ops.Softmax(ops.MatMul(x, weight))])
    given = np.ones((5, 4), np.float32)
    for late in (1, 2, 3, 5, 8):
        model = sg.compile_model(graph, device, {"COMPILE_TIMEOUT": 60})
        file = io.BytesIO()
        with monkeypatch.context() as own:
            own.setattr(limits, "time", _clock(100.0 / late))
            with suppress(sg.LimitError):
                model.export_model(file)
        for _ in range(2):
            np.testing.assert_allclose(model(given)[0], np.full((5, 4), 0.25), rtol=1e-6)
        if file.tell():
            again = sg.import_model(io.BytesIO(file.getvalue()), device)
            np.testing.assert_allclose(again(given)[0], np.full((5, 4), 0.25), rtol=1e-6)


def test_time_of_kernels_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    def make(module: str, factory: str, variant: dict[str, Any]) -> None:
        begun.append(factory)
        raise RuntimeError("it is not compiled here")

    monkeypatch.setattr(compiler, "make_function", make)
    monkeypatch.setattr(limits, "time", _clock(100.0))
    with limits.limited(seconds=350), pytest.raises(KernelError, match="not compiled here"):
        toolchain._compile(Kernel("some_kernels", "in_time"), "symbol", host.isa())
    with limits.limited(seconds=50), pytest.raises(sg.LimitError, match="compiling kernel"):
        toolchain._compile(Kernel("some_kernels", "late"), "symbol", host.isa())
    assert begun == ["in_time"]


def test_tensors_of_functions_count_each_time_that_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    value = helper.make_tensor("v", _FLOAT, [1000], bytes(4000), raw=True)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
    inner = [helper.make_node("Constant", [], ["y"], value=value)]
    function = helper.make_function("own", "f", [], ["y"], inner, opset_imports=opsets)
    nodes = [helper.make_node("f", [], [f"y{k}"], domain="own") for k in range(1000)]
    outputs = [tensor_info(f"y{k}", [1000]) for k in range(1000)]
    content = model_bytes(nodes, [], outputs, functions=[function])
    assert len(sg.load(content).nodes) == 1000
    with pytest.raises(sg.LimitError, match="tensors take"):
        sg.load(content, memory_limit="1M")


def test_sparse_tensors_count_as_what_they_become() -> None:
    def sparse(name: str) -> onnx.SparseTensorProto:
        values = helper.make_tensor(name, _FLOAT, [1], [1.0])
        return helper.make_sparse_tensor(
            values, helper.make_tensor("i", _INT, [1], [0]), [100 << 20]
        )

    graph = helper.make_graph(
        [helper.make_node("Add", [f"s{k}", "x"], [f"y{k}"]) for k in range(50)],
        "g",
        [tensor_info("x", [1])],
        [tensor_info(f"y{k}", None) for k in range(50)],
        sparse_initializer=[sparse(f"s{k}") for k in range(50)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    with peak_below(1000 << 20), pytest.raises(sg.LimitError, match="tensors take"):
        sg.load(model.SerializeToString(), memory_limit="500M")


def test_a_file_does_not_set_the_budgets_of_who_imports_it() -> None:
    stream = io.BytesIO()
    sg.compile_model(_growing(), "CPU", {"MEMORY_LIMIT": "1M"}).export_model(stream)
    model = sg.import_model(stream.getvalue(), "CPU")
    assert model.get_property("MEMORY_LIMIT") == ""


# ------------------------------------------------------------------ sizes that grow in the graph


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "op_type", ["ConstantOfShape", "Expand", "Reshape", "Tile", "Unsqueeze", "Squeeze", "Slice"]
)
def test_a_list_of_dimensions_that_doubles_is_refused(
    op_type: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(limits.MEMORY_LIMIT.name, "64M")
    nodes = [helper.make_node("Concat", [f"s{k}"] * 2, [f"s{k + 1}"], axis=0) for k in range(40)]
    given = {"ConstantOfShape": ["s40"], "Slice": ["x", "s40", "s40"]}.get(op_type, ["x", "s40"])
    content = model_bytes(
        [*nodes, helper.make_node(op_type, given, ["y"])],
        [tensor_info("x", [1])],
        [tensor_info("y", None)],
        [helper.make_tensor("s0", _INT, [1], [1])],
    )
    with peak_below(300 << 20), pytest.raises(sg.SubgraphError):
        sg.compile_model(content, device)(np.ones(1, np.float32))


def test_a_region_larger_than_every_image_does_not_take_a_sample_for_each_of_its_pixels() -> None:
    x, rois = sg.input("x", (1, 1, 2, 2)), sg.input("rois", (1, 4))
    graph = sg.Graph([x, rois], [sg.ops.RoiAlign(x, rois, np.zeros(1, np.int64))])
    model = sg.compile_model(graph, "REFERENCE")
    image = np.ones((1, 1, 2, 2), np.float32)
    assert model(image, np.array([[0, 0, 2, 2]], np.float32))[0].shape == (1, 1, 1, 1)
    with within(10), pytest.raises(sg.ShapeError, match="samples"):
        model(image, np.array([[0, 0, 1e9, 1e9]], np.float32))


def test_a_type_has_no_more_dimensions_than_arrays_can_have() -> None:
    assert sg.TensorType("float32", (1,) * 64).shape == (1,) * 64
    for dims in ((1,) * 2000, [1] * 2000, [None] * 2000):
        with pytest.raises(sg.ShapeError, match="2000 dimensions"):
            sg.TensorType("float32", dims)

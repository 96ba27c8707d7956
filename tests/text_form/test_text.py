"""The text form: golden text, parse(str(g)) is g over random graphs, errors with their place."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import subgraph as sg
from subgraph import ops, passes
from subgraph.graph.types import ONNX_DTYPE, Array, numpy_dtype
from subgraph.operators.protobuf import SparseTensor
from subgraph.partition.property import SelectorProperty
from subgraph.testing import graphs, selectors
from subgraph.text_form.writer import print_graph

GOLDEN = """graph "net" opsets {"" = 18} {
  doc "two\\nlines"
  meta "author" = "me"
  attr "level" = json "{\\"deep\\": [1, 2.5, null]}"
  input %x: float32[N, 3, "a b", ?]
  input %scale: float32[] = @scale
  weight %w: float32[2] = @w
  weight %big: int8[5000] = @big
  %1: float32[N, 3, "a b", ?], %"odd name" = my.domain::Split@3(%x, -, %w) "first \\"node\\"" \
{axis = -1, alpha = 1.5, s = "é", raw = bytes "/w==", many = [1, 2], none = [], \
t = tensor float32[2] = [1.5, -0.0], of = type seq(optional(map(int64, sparse(float32[2])))), \
body = graph "branch" {
      capture %x: float32[N, 3, "a b", ?]
      weight %w: float32[2] = @w
      %y = Add@14(%x, %w) "Add_0"
      return %y
    }} captures (%x) meta {"affinity" = "CPU"}
  %z: float32[*] = subgraph::_subgraph_op@1(%1, %big) "region" subgraph graph "region" {
    input %a: float32[N, 3, "a b", ?]
    input %b: int8[5000] = @big
    %c: float32[*] = Foo@0(%a, %b) "Foo_0"
    return %c
  }
  return %z, %scale
}
parameter @scale: float32[] = [0.1]
parameter @w: float32[2] = [1.0, -2.0]
parameter @big: int8[5000]
"""


def test_golden_text_reads_back_and_prints_the_same() -> None:
    graph = sg.parse(GOLDEN)
    graph.verify()
    assert str(graph) == GOLDEN
    assert str(graph.clone()) == GOLDEN
    first, region = graph.nodes
    assert first.outputs[1].name == "odd name"
    assert first.inputs[1] is None
    assert first.attrs["raw"] == b"\xff"
    assert np.signbit(first.attrs["t"][1])
    assert first.metadata == {"affinity": "CPU"}
    assert first.bodies[0].parameters["w"] is graph.parameters["w"]
    assert region.subgraph is not None
    assert region.subgraph.inputs[1].parameter is region.inputs[1].parameter  # type: ignore[union-attr]  # pyright: ignore[reportOptionalMemberAccess]
    assert graph.inputs[1].parameter is graph.parameters["scale"]
    assert graph.attrs == {"level": {"deep": [1, 2.5, None]}}


def test_parameters_given_instead_of_those_in_the_text() -> None:
    big = np.arange(5000).astype(np.int8)
    w = sg.Parameter("w", np.array([3, 4], np.float32))
    graph = sg.parse(GOLDEN, {"big": big, "w": w})
    assert graph.parameters["w"] is w
    np.testing.assert_array_equal(graph.parameters["big"].array, big)
    # What neither has is zeros, which take no memory.
    assert not sg.parse(GOLDEN).parameters["big"].array.any()
    with pytest.raises(sg.ModelError, match=r"@w was given as float32\[3\]"):
        sg.parse(GOLDEN, {"w": np.zeros(3, np.float32)})


def test_how_much_of_the_data_is_written() -> None:
    rng = np.random.default_rng(0)
    w = sg.parameter("w", rng.standard_normal(2000).astype(np.float32))
    graph = sg.Graph([], [ops.Relu(w)])
    assert "= base64" in print_graph(graph, "all")
    assert "=" not in str(graph).split("parameter @w")[1]
    assert "=" not in print_graph(graph, "none").split("parameter @w")[1]
    digest = print_graph(graph, "digest")
    assert re.search(r'sha256 "[0-9a-f]{64}"', digest)
    array = sg.parse(print_graph(graph, "all")).parameters["w"].array
    np.testing.assert_array_equal(array, graph.parameters["w"].array)
    graph.parameters["w"].assign(np.zeros(2000, np.float32))
    assert print_graph(graph, "digest") != digest


def test_text_by_hand_needs_only_what_matters() -> None:
    graph = sg.parse(
        """
        graph "hand" {          # a comment
          input %x: float32[2, 3]
          weight %w: float32[3]
          %y = Add(%x, %w)
          return %y
        }"""
    )
    assert graph.nodes[0].name == "Add_0"
    assert graph.parameters["w"].type == sg.TensorType("float32", (3,))


@pytest.mark.parametrize(
    ("text", "place", "why"),
    [
        ("", "line 1, column 1", "'graph'"),
        ("graph 3", "line 1, column 7", "string"),
        ('graph "a" {\n  input x\n}', "line 2, column 9", "'%'"),
        ('graph "a" {\n  %y = Relu(%x)\n  return %y }', "line 2, column 13", "%x"),
        ('graph "a" {\n  input %x: float33[2]\n  return }', "line 2, column 13", "float33"),
        ('graph "a" {\n  input %x: float32[2\n  return }', "line 3, column 3", "']'"),
        ('graph "a" {\n  input %x\n  input %x\n  return }', "line 3, column 9", "twice"),
        ('graph "a" {\n  %y = A() {k = }\n return %y }', "line 2, column 17", "attribute"),
        ('graph "a" {\n  %y = A() {k = opaque "x"}\n return %y }', "line 2", "text form"),
        ('graph "a" {\n  %y = A() {k = tensor int8[2] = [1]}\n return %y }', "line 2", "int8[2]"),
        ('graph "a" {\n  weight %w\n return %w }', "line 3, column 2", "fixed shape"),
        ('graph "a" { return } extra', "line 1, column 22", "'parameter'"),
        ('graph "a" { return }\nparameter @w: float32[N]', "line 2", "fixed shape"),
        ('graph "a" {\n %y = A() "n"\n %z = A() "n"\n return }', "line 1, column 11", "'n'"),
        ('graph "a" {\n %y = A(%y)\n return %y }', "line 2", "%y"),
        ('graph "a" { return }\nparameter @w: int8[2] = base64 "!"', "line 2", "int8[2]"),
        # Found by fuzzing: NumPy parses the names of dtypes, and limits sizes.
        ('graph "a" {\n  input %x: "(9999999999,)f4"[2]\n  return }', "line 2", "not a dtype"),
        ('graph "a" {\n  input %x: "\\ud800"[2]\n  return }', "line 2, column 13", "not a dtype"),
        ('graph "a" {\n  input %x: "f4,,"[2]\n  return }', "line 2, column 13", "not a dtype"),
        ('graph "a" { return }\nparameter @w: int8[9999999999, 9999999999]', "line 2", "no array"),
        (f'graph "a" {{ return }}\nparameter @w: int8[{"1, " * 70}]', "line 2", "no array"),
        ('graph "a" { return }\nparameter @w: string[1] = [5]', "line 2", "string[1]"),
        ('graph "a" {\n  attr "k" = json "' + "9" * 5000 + '"\n  return }', "line 2", "not JSON"),
        ('graph "a" opsets {"" = ' + "9" * 5000 + "} { return }", "line 1", "not a number"),
        ('graph "a" {\n  %y = A() {k = sparse [1, 2, 3]}\n  return }', "line 2", "sparse tensor"),
    ],
)
def test_errors_say_where(text: str, place: str, why: str) -> None:
    with pytest.raises(sg.ModelError) as caught:
        sg.parse(text)
    assert place in str(caught.value)
    assert why in str(caught.value)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(graphs(), st.data())
def test_random_graphs_read_back(graph: sg.Graph, data: st.DataObject) -> None:
    def check(graph: sg.Graph) -> None:
        text = print_graph(graph, "all")
        again = sg.parse(text)
        again.verify()
        assert print_graph(again, "all") == text

    check(graph)
    graph.attrs["subgraph_property"] = SelectorProperty(data.draw(selectors()), "mine")
    parted = passes.apply_pass(graph, "PartitionGraph")
    parted.attrs.clear()
    check(parted)


WORDS = [
    *("graph", "opsets", "doc", "meta", "attr", "json", "input", "capture", "weight", "return"),
    *("captures", "subgraph", "parameter", "none", "bytes", "type", "tensor", "sparse", "opaque"),
    *("seq", "optional", "map", "base64", "sha256", "float32", "inf", "nan", "-inf", "-", "?", "*"),
    *("node", "output", "1", "-1", "1.5e3", "0x", "", " ", '"', "\\", "a b", "é", "\n", "\u2028"),
    *("#", "%", "@", "::", "}", "a::b", "w#2", "return\n}", "parameter @w: int8[1]", "\ud800"),
]
NAMES = st.one_of(
    *(st.sampled_from(WORDS), st.text(max_size=4)),
    st.tuples(*map(st.sampled_from, (WORDS, ".$/-#", WORDS))).map("".join),
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_name_reads_back(data: st.DataObject) -> None:
    """Found by review: a node without results that is named like a keyword, a size named inf."""

    def names(count: int) -> list[str]:
        found = data.draw(st.lists(NAMES, min_size=count, max_size=count, unique=True))
        return [name or "empty" for name in found] if "empty" not in found else found

    values, nodes, words = names(5), names(4), names(6)
    x = sg.Value(values[0], sg.TensorType("float32", (data.draw(NAMES), 2)))
    w = sg.parameter(values[1], np.ones(2, np.float32))
    made: list[sg.Node] = []
    for k, name in enumerate(nodes):
        outputs = data.draw(st.integers(0, 1))
        made.append(
            sg.Node(
                data.draw(NAMES),
                [x, None, w],
                outputs=[sg.Value(values[k + 1], x.type)] if outputs and k else 0,
                name=name,
                domain=data.draw(NAMES),
                attrs={data.draw(NAMES): data.draw(NAMES)},
                metadata={data.draw(NAMES): data.draw(NAMES)} if data.draw(st.booleans()) else {},
            )
        )
    graph = sg.Graph(
        [x], [v for n in made for v in n.outputs], data.draw(NAMES), nodes=made,
        attrs={words[0]: words[1]}, metadata={words[2]: words[3]}, doc=words[4],
    )  # fmt: skip
    text = print_graph(graph, "all")
    again = sg.parse(text)
    again.verify()
    assert print_graph(again, "all") == text
    assert [(n.name, n.op_type, n.domain, n.attrs) for n in again.nodes] == [
        (n.name, n.op_type, n.domain, n.attrs) for n in graph.nodes
    ]
    assert [value.type for value in again.inputs] == [x.type]
    assert [value.name for value in again.outputs] == [value.name for value in graph.outputs]


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_refused_cleanly(text: str) -> None:
    with pytest.raises(sg.ModelError):
        sg.parse('graph "x" {' + text)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(GOLDEN) - 2), st.text(max_size=3))
def test_changed_text_reads_or_is_refused(at: int, new: str) -> None:
    with contextlib.suppress(sg.SubgraphError):
        sg.parse(GOLDEN[:at] + new + GOLDEN[at + 1 :]).verify()


def attribute(value: Any) -> Any:
    node = sg.Node("Foo", outputs=1, attrs={"a": value})
    return sg.parse(print_graph(sg.Graph([], node.outputs), "all")).nodes[0].attrs["a"]


SCALARS = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=9), st.binary(max_size=9)
)


@settings(max_examples=200, deadline=None)
@given(st.one_of(SCALARS, st.lists(SCALARS, max_size=4).map(tuple)))
def test_attributes_read_back(value: Any) -> None:
    back = attribute(value)
    assert repr(back) == repr(value)
    assert type(back) is type(value)


@settings(max_examples=200, deadline=None)
@given(
    hnp.arrays(
        st.sampled_from(["f4", "f8", "f2", "i1", "u8", "i8", "?", "c8"]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
    )
)
def test_arrays_read_back_bit_for_bit(array: Array) -> None:
    back = attribute(array)
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert back.tobytes() == array.tobytes()


@pytest.mark.parametrize("name", [name for name in ONNX_DTYPE if name != "string"])
@pytest.mark.parametrize("count", [3, 40])
def test_arrays_of_every_dtype(name: str, count: int) -> None:
    array: Array = np.arange(count).__mod__(2).astype(numpy_dtype(name))
    back = attribute(array)
    assert back.dtype == array.dtype
    assert back.tobytes() == array.tobytes()


def test_arrays_of_strings_and_sparse_tensors() -> None:
    strings = np.array([["a", "é\n"], ['"', ""]], dtype=object)
    np.testing.assert_array_equal(attribute(strings), strings)
    sparse = attribute(SparseTensor(np.ones(1, np.float32), np.zeros(1, np.int64), (2, 3)))
    assert isinstance(sparse, SparseTensor)
    assert sparse.shape == (2, 3)


def test_a_capture_that_is_a_parameter_is_listed_once() -> None:
    """Found by fuzzing: it was listed among the weights, too, and the text not read back."""
    text = 'graph "g" {\n  capture %p: int8[] = @p\n  %y = A(%p) "a"\n  return %y\n}'
    graph = sg.parse(text + '\n\nparameter @p: int8[] = base64 "AQ=="\n')
    assert [value.name for value in sg.parse(str(graph)).captures] == ["p"]


def test_a_long_graph_needs_no_recursion() -> None:
    x = value = sg.input("x", (2,))
    for k in range(20_000):
        node = sg.Node("Relu", [value], version=14, name=f"n{k}")
        value = node.outputs[0]
    text = str(sg.Graph([x], [value]))
    assert len(sg.parse(text).nodes) == 20_000

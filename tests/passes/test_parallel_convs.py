"""AddConvolutions: sums of convolutions of one value, compared with ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops, passes
from subgraph.passes.patterns import weight_values
from tests.support.peer import check_results, session_of, uniform

SIZES = (9, 8, 7)


def _weight(name: str, *shape: int) -> sg.Value:
    return sg.parameter(name, uniform(*shape, seed=len(name)) / np.float32(4))


def _operators(graph: sg.Graph, name: str = "AddConvolutions") -> list[str]:
    """Return the operators on values, sorted, after a pass."""
    graph = passes.apply_pass(graph, name)
    known = weight_values(graph)
    return sorted(node.op_type for node in graph.nodes if known.isdisjoint(node.outputs))


def _check(graph: sg.Graph, *shape: int) -> None:
    session = session_of(graph)
    for threads in (1, 2):
        model = sg.compile_model(graph, "CPU", {"INFERENCE_NUM_THREADS": threads})
        check_results(model, session, [uniform(*shape)], tolerance=1e-4)


def _block(x: sg.Value, channels: int, groups: int, name: str = "") -> sg.Value:
    """Return a block as RepVGG and MobileOne are trained: three branches, each normalized."""

    def norm(value: sg.Value, branch: str) -> sg.Value:
        named = f"{name}{branch}"
        var = sg.parameter(f"{named}.var", uniform(channels) ** 2 + np.float32(0.5))
        others = [_weight(f"{named}.{each}", channels) for each in ("scale", "bias", "mean")]
        return ops.BatchNormalization(value, *others, var)

    width = channels // groups
    three = ops.Conv(x, _weight(f"{name}3", channels, width, 3, 3), pads=[1] * 4, group=groups)
    one = ops.Conv(x, _weight(f"{name}1", channels, width, 1, 1), group=groups)
    y = ops.Add(ops.Add(norm(one, "one"), norm(three, "three")), norm(x, "self"))
    return ops.Relu(y)


@pytest.mark.parametrize("groups", [1, 2, 16])
def test_blocks_of_three_branches_become_one_convolution_each(groups: int) -> None:
    x = sg.input("x", (2, 16, 7, 6))
    graph = sg.Graph([x], [_block(_block(x, 16, groups), 16, groups, "second")])
    folded = passes.apply_pass(graph, "FoldScale")
    assert _operators(folded) == ["Conv", "Conv", "Relu", "Relu"]
    _check(graph, 2, 16, 7, 6)


def test_a_normalization_of_the_sum_goes_into_the_weight() -> None:
    """As RepViT does, with the input itself as a branch of a depthwise convolution."""
    x = sg.input("x", (1, 16, 6, 5))
    three = ops.Conv(x, _weight("w", 16, 1, 3, 3), pads=[1] * 4, group=16)
    one = ops.Conv(x, _weight("one", 16, 1, 1, 1), group=16)
    y = ops.Add(x, ops.Add(three, one))
    y = ops.Add(ops.Mul(y, _weight("scale", 16, 1, 1)), _weight("shift", 16, 1, 1))
    graph = sg.Graph([x], [y])
    assert _operators(graph) == ["Conv"]
    _check(graph, 1, 16, 6, 5)


def test_the_sum_follows_its_parameters() -> None:
    x = sg.input("x", (1, 16, 6, 5))
    large, small = _weight("w", 16, 16, 3, 3), _weight("one", 16, 16, 1, 1)
    y = ops.Add(ops.Conv(x, large, pads=[1] * 4), ops.Conv(x, small))
    graph = sg.Graph([x], [y])
    model, inputs = sg.compile_model(graph, "CPU"), [uniform(1, 16, 6, 5)]
    for weight in (large, small):
        assert weight.parameter is not None
        weight.parameter.assign(np.asarray(weight.parameter.array) * np.float32(3))
        check_results(model, session_of(graph), inputs, tolerance=1e-4)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_branches(data: st.DataObject) -> None:
    """Compare all geometries with ONNX Runtime, those too that cannot be added."""
    rank = data.draw(st.integers(1, 3), "rank")
    groups = data.draw(st.sampled_from([1, 2, 6]), "groups")
    outputs = data.draw(st.sampled_from([6, 12]), "outputs")
    stride = data.draw(st.sampled_from([1, 1, 2]), "stride")
    x = sg.input("x", (2, 6, *SIZES[:rank]))
    y: sg.Value | None = None
    for k in range(data.draw(st.integers(2, 3), "branches")):
        kind = data.draw(st.sampled_from(["conv", "conv", "scale", "self"]), "kind")
        term = x
        if kind == "conv":
            # All branches have the sizes of a result without padding of a 1 x 1 convolution.
            kernel, pads = [1] * rank, [0] * (2 * rank)
            dilation = data.draw(st.sampled_from([1, 2]), "dilation")
            for axis in range(rank):
                kernel[axis] = data.draw(st.integers(1, 3), "kernel")
                more = (kernel[axis] - 1) * dilation
                pads[axis] = data.draw(st.integers(0, more), "begin")
                pads[axis + rank] = more - pads[axis]
            term = ops.Conv(
                x,
                _weight(f"w{'.' * k}", outputs, 6 // groups, *kernel),
                _weight(f"bias{'.' * k}", outputs) if data.draw(st.booleans(), "bias") else None,
                pads=pads,
                dilations=[dilation] * rank,
                strides=[stride] * rank,
                group=groups,
            )
        elif stride > 1 or outputs != 6:
            continue
        elif kind == "scale":
            term = ops.Mul(x, _weight(f"scale{'.' * k}", 6, *[1] * rank))
            if data.draw(st.booleans(), "shift"):
                term = ops.Add(_weight(f"shift{'.' * k}", 6, *[1] * rank), term)
        y = term if y is None else ops.Add(*data.draw(st.permutations([y, term]), "order"))
    if y is None or y is x:
        return
    _check(sg.Graph([x], [y]), 2, 6, *SIZES[:rank])


def _large(x: sg.Value) -> sg.Value:
    return ops.Conv(x, _weight("w", 16, 16, 3, 3), pads=[1] * 4)


def _small(x: sg.Value, **attributes: Any) -> sg.Value:
    return ops.Conv(x, _weight("one", 16, 16, 1, 1), **attributes)


def test_other_sums_stay() -> None:
    x, w = sg.input("x", (1, 16, 6, 6)), sg.input("fed", (16, 16, 1, 1))

    def convolutions(y: sg.Value, *others: sg.Value) -> int:
        inputs = [x, w] if others == (w,) else [x]
        return _operators(sg.Graph(inputs, [y, *others])).count("Conv")

    small = _small(x)
    assert convolutions(ops.Add(_large(x), small), ops.Relu(small)) == 2
    assert convolutions(ops.Add(_large(x), small), small) == 2
    assert convolutions(ops.Add(_large(x), _small(ops.Relu(x)))) == 2
    # The result of a kernel of the image's size is one pixel, which is broadcast.
    assert convolutions(ops.Add(_large(x), ops.Conv(x, _weight("all", 16, 16, 6, 6)))) == 2
    # Padding by the name of a rule may differ from padding in numbers.
    assert convolutions(ops.Add(_large(x), _small(x, auto_pad="SAME_UPPER"))) == 2
    # A weight that is an input can differ from run to run.
    assert convolutions(ops.Add(_large(x), ops.Conv(x, w)), w) == 2
    # The epilogue of a convolution adds the unscaled input, unless it is depthwise.
    graph = sg.Graph([x], [ops.Add(_large(x), x)])
    assert _operators(graph) == ["Add", "Conv"]


@pytest.mark.parametrize(
    ("shape", "offset"), [((2, 3, 2, 2), (2, 0)), ((2, 2, 1, 1), (0, 0)), ((3,), (1, 1))]
)
def test_weights_that_do_not_fit_are_refused(
    shape: tuple[int, ...], offset: tuple[int, ...]
) -> None:
    w, added = sg.parameter("w", uniform(2, 3, 3, 3)), sg.parameter("v", uniform(*shape))
    node = sg.Node("AddConvWeights", [w, added], domain="subgraph.cpu", attrs={"offset": offset})
    with pytest.raises(sg.ShapeError, match="added weight"):
        sg.compile_model(sg.Graph([], [node.outputs[0]]), "CPU")([])

"""Operands that do not fit never reach a library that does not check them."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.devices.backends.operand_checks import OperandChecks
from subgraph.devices.backends.torch import TorchDevice
from subgraph.graph.types import Array
from tests.support.backends import PACKAGES, installed, no_package

INSTALLED = installed(*PACKAGES)


def _ones(*shape: int) -> Array:
    return np.ones(shape, np.float32)


def _inputs(**arrays: Array) -> list[sg.Value]:
    return [
        sg.input(name, [f"{name}{axis}" for axis in range(array.ndim)], str(array.dtype))
        for name, array in arrays.items()
    ]


def _scatter(index: int) -> tuple[Any, dict[str, Array], dict[str, Array]]:
    good = {"x": _ones(4, 3), "i": np.zeros((4, 3), np.int32), "u": _ones(4, 3)}
    return ops.ScatterElements, good, good | {"i": np.full((4, 3), index, np.int32)}


def _rnn(**wrong: Array) -> tuple[Any, dict[str, Array], dict[str, Array]]:
    good = {"x": _ones(5, 2, 3), "w": _ones(1, 4, 3), "r": _ones(1, 4, 4), "b": _ones(1, 8)}
    good |= {"s": np.array([5, 5], np.int32), "h": _ones(1, 2, 4)}
    return (lambda *xs: ops.RNN(*xs, hidden_size=4, outputs=2)[0]), good, good | wrong


# Each was taken by OpenVINO; the first two write outside of the tensor.
CASES = {
    "an index below the first": _scatter(-10),
    "an index beyond the last": _scatter(1000),
    "a sequence longer than all": _rnn(s=np.array([5, 2**31 - 1], np.int32)),
    "a sequence of -1 steps": _rnn(s=np.array([5, -1], np.int32)),
    "one length for two sequences": _rnn(s=np.array([5], np.int32)),
    "states for one of two sequences": _rnn(h=_ones(1, 1, 4)),
    "indices of a Gather": (
        ops.Gather,
        {"x": _ones(4, 3), "i": np.array([1], np.int32)},
        {"x": _ones(4, 3), "i": np.array([4], np.int32)},
    ),
    "one variance for all channels": (
        ops.BatchNormalization,
        {"x": _ones(1, 4, 2, 2)} | {name: _ones(4) for name in "sbmv"},
        {"x": _ones(1, 4, 2, 2)} | {name: _ones(4) for name in "sbm"} | {"v": _ones(1)},
    ),
}


@pytest.mark.parametrize("device", INSTALLED)
@pytest.mark.parametrize("name", CASES)
def test_operands_that_do_not_fit_are_refused(name: str, device: str) -> None:
    build, good, wrong = CASES[name]
    inputs = _inputs(**good)
    graph = sg.Graph(inputs, [build(*inputs)])
    model = sg.compile_model(graph, device)
    expected = sg.compile_model(graph, "REFERENCE")(good)[0]
    np.testing.assert_allclose(model(good)[0], expected, rtol=1e-5)
    with pytest.raises(sg.ShapeError):
        model(wrong)
    np.testing.assert_allclose(model(good)[0], expected, rtol=1e-5)


class _Card(TorchDevice):
    """TORCH that runs on the processor what it is told to run on a card."""

    def compile_library_model(self, model: bytes, options: Any) -> Any:
        return super().compile_library_model(model, attrs.evolve(options, DEVICE="cpu"))


@pytest.mark.skipif(bool(no_package("TORCH")), reason=no_package("TORCH"))
@pytest.mark.parametrize("where", ["cuda", "cuda:1", "cpu", "cpu:0"])
def test_pytorch_on_a_card_gets_checked_operands(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index out of range would end the kernel, and with it all use of the card."""
    checked: list[int] = []
    check = OperandChecks.check

    def counted(self: OperandChecks, inputs: Any) -> bool:
        checked.append(1)
        return check(self, inputs)

    monkeypatch.setattr(OperandChecks, "check", counted)
    core = sg.Core()
    core.register_device("CARD", _Card)
    on_card = where.startswith("cuda")
    build, good, wrong = CASES["indices of a Gather"]
    inputs = _inputs(**good)
    model = core.compile_model(sg.Graph(inputs, [build(*inputs)]), "CARD", {"DEVICE": where})
    model(good)
    assert bool(checked) is on_card
    with pytest.raises(sg.ShapeError):
        model(wrong)
    x, table = sg.input("x", (3, 4)), sg.input("table", (4, 5))
    computed = sg.Graph([x, table], [ops.Gather(table, ops.Cast(x, to="int64"))])
    taken = core.query_model(computed, "CARD", {"DEVICE": where})
    assert len(taken) == (1 if on_card else 2)


@pytest.mark.parametrize("device", INSTALLED)
def test_indices_that_a_region_computes(device: str) -> None:
    """OpenVINO would get them unchecked: the Gather runs elsewhere, or not with a bad index."""
    x, factor = sg.input("x", ("N", 4)), sg.input("factor", (), "int32")
    found = ops.Cast(ops.ArgMax(x, axis=1, keepdims=0), to="int32")
    graph = sg.Graph([x, factor], [ops.Gather(ops.Relu(x), ops.Mul(found, factor), axis=1)])
    model = sg.compile_model(graph, f"HETERO:{device},CPU")
    data = np.arange(8, dtype=np.float32).reshape(2, 4)
    assert model(x=data, factor=np.int32(1))[0].tolist() == [[3, 3], [7, 7]]
    with pytest.raises(sg.ShapeError, match="indices holds 300, which is outside"):
        model(x=data, factor=np.int32(100))


@pytest.mark.parametrize("device", INSTALLED)
def test_sizes_that_are_inputs(device: str) -> None:
    x, shape = sg.input("x", ("N", "M")), sg.input("shape", (2,), "int64")
    y = ops.MatMul(ops.Reshape(ops.Relu(x), shape), sg.parameter("w", _ones(4, 4)))
    model = sg.compile_model(sg.Graph([x, shape], [y]), device)
    for sizes in ((2, 4), (-1, 4), (1, 4)):
        data = _ones(abs(sizes[0]), 4)
        assert model(x=data, shape=np.array(sizes))[0].tolist() == [[4.0] * 4] * abs(sizes[0])
    for sizes in ((3, 4), (4, 2), (-1, 3), (-1, -1)):
        with pytest.raises(sg.ShapeError):
            model(x=_ones(2, 4), shape=np.array(sizes))


def test_what_is_checked_before_a_run() -> None:
    """True: everything was; False: the elements of an operand are computed inside."""
    x, i = sg.input("x", ("N", 4)), sg.input("i", ("K",), "int64")
    data, index = _ones(3, 4), np.array([2])
    checks = OperandChecks(sg.Graph([x, i], [ops.Gather(ops.Relu(x), i)]))
    assert checks.check([data, index])
    with pytest.raises(sg.ShapeError, match=r"\(Gather\): indices holds 3, which is outside"):
        checks.check([data, np.array([3])])
    assert checks.check([_ones(4, 4), np.array([3])])
    computed = sg.Graph([x, i], [ops.Gather(ops.Relu(x), ops.Neg(i))])
    assert not OperandChecks(computed).check([data, index])
    from_sizes = ops.Gather(ops.Shape(x), np.array([0]))
    sized = sg.Graph([x], [ops.Reshape(x, ops.Concat(np.array([-1]), from_sizes, axis=0))])
    assert OperandChecks(sized).check([data])

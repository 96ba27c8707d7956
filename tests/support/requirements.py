"""Operands that do not fit, and what must happen to them: shared by the tests of requirements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import pytest

import subgraph as sg
from subgraph.graph.types import Array, dtype_of
from subgraph.operators.schema import get_schema

DEVICES = ("REFERENCE", "CPU", "OPENCL")


@attrs.frozen
class Use:
    """One use of an operator.

    Attributes:
        op: The operator.
        inputs: Its inputs, None where one is left out.
        attrs: Its attributes.
        version: Opset version, 0 for the newest.
        outputs: Number of outputs.
        domain: The operator's domain.
    """

    op: str
    inputs: Sequence[Array | None]
    attrs: dict[str, Any] = attrs.field(factory=dict[str, Any])
    version: int = 0
    outputs: int = 1
    domain: str = ""

    @property
    def name(self) -> str:
        """The use as text."""
        shown = ",".join("-" if a is None else str(list(a.shape)) for a in self.inputs)
        options = ",".join(f"{key}={value}" for key, value in self.attrs.items())
        return f"{self.op}{self.version or ''}({shown};{options})".replace(" ", "")


def floats(*shape: int) -> Array:
    """Return an operand of float32."""
    return np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)


def ints(*numbers: int, dtype: str = "int64") -> Array:
    """Return an operand of whole numbers, a list."""
    return np.array(numbers, dtype)


def bytes_of(*shape: int, dtype: str = "uint8") -> Array:
    """Return an operand of bytes."""
    return (np.arange(int(np.prod(shape))) % 100).astype(dtype).reshape(shape)


def run(use: Use, device: str, weights: Sequence[int] = (), **config: Any) -> list[Array]:
    """Compile and run one node whose inputs have symbolic sizes, some of them weights.

    Args:
        use: What is computed.
        device: Where.
        weights: Positions of the inputs that are weights.
        **config: Options of the device.
    """
    operands: list[sg.Value | None] = []
    given: list[Array] = []
    inputs: list[sg.Value] = []
    for k, array in enumerate(use.inputs):
        if array is None:
            operands.append(None)
        elif k in weights:
            operands.append(sg.parameter(f"w{k}", array))
        else:
            dims = [f"d{k}_{d}" for d in range(array.ndim)]
            inputs.append(sg.input(f"in{k}", dims, dtype_of(array)))
            operands.append(inputs[-1])
            given.append(array)
    node = sg.Node(
        use.op,
        operands,
        outputs=use.outputs,
        name="culprit",
        domain=use.domain,
        version=use.version or get_schema(use.op, use.domain, 0).since_version,
        attrs=use.attrs,
    )
    graph = sg.Graph(inputs=inputs, outputs=list(node.outputs))
    results = sg.compile_model(graph, device, config)(given)
    return [np.asarray(results[k]) for k in range(use.outputs)]


def assert_refused(use: Use, device: str, why: str = "culprit") -> None:
    """Check that operands are refused as inputs, as weights, and as weights beside an input.

    Args:
        use: What is to be refused.
        device: Where.
        why: A part of the message, which names the node, too.
    """
    count = len(use.inputs)
    for weights in ((), range(1, count), range(count)):
        with pytest.raises(sg.ShapeError, match=why) as refused:
            run(use, device, weights)
        assert "culprit" in str(refused.value)


def assert_agree(use: Use, device: str, tolerance: float = 1e-5) -> None:
    """Check that operands are taken as inputs and as weights, with the reference's results."""
    wanted = run(use, "REFERENCE")
    for weights in ((), range(1, len(use.inputs))):
        for found, want in zip(run(use, device, weights), wanted, strict=True):
            assert found.shape == want.shape
            np.testing.assert_allclose(found, want, rtol=tolerance, atol=tolerance)


def refused(rows: Sequence[Use] | Sequence[tuple[Use, str]]) -> Callable[..., None]:
    """Return a test which checks that every device refuses operands.

    Args:
        rows: What is to be refused, alone or with a part of the message.
    """
    cases = [row if isinstance(row, tuple) else (row, "culprit") for row in rows]
    named = [pytest.param(use, why, id=f"{use.name}-{k}") for k, (use, why) in enumerate(cases)]

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize(("use", "why"), named)
    def test(device: str, use: Use, why: str) -> None:
        assert_refused(use, device, why)

    return test


def taken(
    uses: Sequence[Use], devices: Sequence[str] = DEVICES, tolerance: float = 1e-5
) -> Callable[..., None]:
    """Return a test which checks that devices give the reference's results.

    Args:
        uses: What is computed.
        devices: Where.
        tolerance: Of the results, relative and absolute.
    """

    @pytest.mark.parametrize("device", devices)
    @pytest.mark.parametrize("use", uses, ids=lambda use: use.name)
    def test(device: str, use: Use) -> None:
        assert_agree(use, device, tolerance)

    return test


def empty(uses: Sequence[Use]) -> Callable[..., None]:
    """Return a test which checks that operands without elements give such results everywhere.

    ONNX Runtime takes them too: a batch of 0 is no error.
    """

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("use", uses, ids=lambda use: use.name)
    def test(device: str, use: Use) -> None:
        for weights in ((), range(1, len(use.inputs))):
            assert not any(found.size for found in run(use, device, weights))
        assert_agree(use, device)

    return test

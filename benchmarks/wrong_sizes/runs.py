"""Models, and what devices and ONNX Runtime make of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeGuard

import attrs
import numpy as np
import onnx

import subgraph as sg
from subgraph.errors import InternalError, SubgraphError
from subgraph.graph.types import Array
from wrong_sizes.samples import Operand, element_type

_IR_VERSION = 10


def make_model(
    nodes: Sequence[onnx.NodeProto],
    values: dict[str, Operand],
    types: dict[str, onnx.TypeProto],
    opsets: dict[str, int],
    shape: Callable[[str], Any],
    constant: Collection[str] = (),
) -> onnx.ModelProto:
    """Return a model whose outputs are the results that no node takes.

    Args:
        nodes: Its nodes.
        values: Its operands.
        types: Types of those that are no tensors.
        opsets: Version of each domain.
        shape: Gives the shape that an operand is declared with; None for an unknown one.
        constant: Names of operands that are constants.
    """
    graph = onnx.GraphProto(name="g", node=nodes)
    for name, value in values.items():
        if not isinstance(value, np.ndarray):
            graph.input.add(name=name, type=types[name])
        elif name in constant:
            graph.initializer.append(onnx.numpy_helper.from_array(value, name))
        else:
            number = element_type(value)
            graph.input.append(onnx.helper.make_tensor_value_info(name, number, shape(name)))
    taken = {name for node in nodes for name in node.input}
    made = [name for node in nodes for name in node.output if name and name not in taken]
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in made)
    imports = [onnx.helper.make_opsetid(d, v) for d, v in opsets.items()]
    return onnx.helper.make_model(graph, opset_imports=imports, ir_version=_IR_VERSION)


@attrs.frozen
class Answer:
    """What a runtime makes of operands: results, or the error."""

    results: list[Any] | None
    error: str = ""
    raw: bool = False


def _failed(error: BaseException) -> Answer:
    raw = not isinstance(error, SubgraphError) or isinstance(error, InternalError)
    return Answer(None, said_by(error), raw)


def ours(
    device: str, model: onnx.ModelProto, runs: Sequence[dict[str, Operand]], *, warm: bool = False
) -> list[Answer]:
    """Run a model on a device of ours with several sets of operands in turn.

    Args:
        device: The device.
        model: The model.
        runs: Sets of operands.
        warm: The first set is honest; what becomes of it does not matter.
    """
    try:
        compiled = sg.Core().compile_model(sg.load(model), device)
    except Exception as error:
        return [_failed(error)] * (len(runs) - warm)
    answers: list[Answer] = []
    for values in runs:
        try:
            found = compiled(values)
            answers.append(Answer([found[k] for k in range(len(model.graph.output))]))
        except Exception as error:
            answers.append(_failed(error))
    return answers[1:] if warm else answers


def in_onnxruntime(
    model: onnx.ModelProto, runs: Sequence[dict[str, Operand]], phase: Callable[[int], None]
) -> list[Answer]:
    """Run a model in ONNX Runtime with several sets of operands in turn."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.enable_cpu_mem_arena = False  # an arena that once grew is not returned
    try:
        phase(0)
        session = ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:
        return [Answer(None, said_by(error))] * len(runs)
    answers: list[Answer] = []
    for position, values in enumerate(runs):
        phase(position)
        try:
            answers.append(Answer(list(session.run(None, values))))
        except Exception as error:
            answers.append(Answer(None, said_by(error)))
    return answers


def said_by(error: BaseException) -> str:
    """Return class and beginning of the message of an error."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def _leaves(value: Any) -> list[Any]:
    """Return what a result holds: the items of sequences, the keys and values of maps."""
    items: Any = list(value.items()) if hasattr(value, "items") else value
    if isinstance(items, (list, tuple)):
        return [leaf for item in items for leaf in _leaves(item)]
    return [value]


def _is_array(value: object) -> TypeGuard[Array]:
    return isinstance(value, np.ndarray)


def differs(mine: Sequence[Any], theirs: Sequence[Any]) -> str:
    """Return how results differ, "" if they do not."""
    from fuzz import difference

    mine, theirs = _leaves(list(mine)), _leaves(list(theirs))
    if len(mine) != len(theirs):
        return f"{len(mine)} values, there {len(theirs)}"
    pairs: list[tuple[Array, Array]] = []
    for one, other in zip(mine, theirs, strict=True):
        if not _is_array(one) or one.dtype.kind in "OUS":
            if str(one) != str(other):
                return "other texts"
        elif one.dtype.isbuiltin == 1:
            pairs.append((one, other))
        elif one.dtype == other.dtype:  # bfloat16, float8, int4; as halves are compared
            pairs.append((one.astype(np.float16), other.astype(np.float16)))
    return difference([one for one, _ in pairs], [other for _, other in pairs])


def told(answer: Answer) -> str:
    """Return an answer in words."""
    if answer.results is None:
        return answer.error
    return "gives " + ", ".join(
        f"{r.dtype}{list(r.shape)}" if _is_array(r) else type(r).__name__ for r in answer.results
    )

"""Graphs of ``torch.compile`` with operators that PyTorch cannot write as ONNX.

Such a graph is cut at these operators: PyTorch runs them, and the parts between them are compiled,
each when it is called for the first time, as then its inputs exist.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

# Given a traced graph and the inputs of its first call, returns the function that runs it.
Compile = Callable[[Any, Sequence[Any]], Callable[..., Any]]


def unwritten_operator(error: BaseException) -> str:
    """Return the operator that PyTorch's exporter could not write, as "aten.roll.default".

    Args:
        error: The exporter's error. Its message, or that of a cause, names the operator.

    Returns:
        The name of the overload; "" if no message has one.
    """
    cause: BaseException | None = error
    while cause is not None:
        if found := re.search(r"call_function\[target=torch\.ops\.([\w.]+)\]", str(cause)):
            return found[1]
        cause = cause.__cause__
    return ""


def run_in_parts(
    torch: Any, module: Any, example_inputs: Sequence[Any], operator: str, compile_part: Compile
) -> tuple[Callable[..., Any], int] | None:
    """Return a function that runs a traced graph without an operator's nodes in compiled parts.

    Args:
        torch: The module torch.
        module: The ``torch.fx.GraphModule``.
        example_inputs: Its inputs at the first call.
        operator: The operator that PyTorch runs, as "aten.roll.default".
        compile_part: Compiles one part.

    Returns:
        The function, and the number of nodes that PyTorch runs. None if no node of the graph is
        known to call the operator, or nothing else is computed.
    """
    left = _callers(torch, module, example_inputs, operator)
    numbers: dict[Any, int] = {}
    current = 0  # even numbers: parts to compile; odd ones: PyTorch's
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if _is_item(node) and node.args[0] in left:
            left.add(node)  # an item of a tuple, which is no result of a part
            numbers[node] = numbers[node.args[0]]
            continue
        current += (current % 2 == 1) != (node in left)
        numbers[node] = current
    if not left or len(left) == len(numbers):
        return None
    split = import_module("torch.fx.passes.split_module").split_module
    whole = split(module, None, numbers.__getitem__, keep_original_order=True)
    for name, part in list(whole.named_children()):
        if re.fullmatch(r"submod_\d*[02468]", name):
            runner = torch.nn.Module()
            runner.forward = _Part(part, compile_part)
            setattr(whole, name, runner)
    return whole.forward, len(left)


def _is_item(node: Any) -> bool:
    return getattr(node.target, "__name__", "") == "getitem" and isinstance(node.args[1], int)


def _callers(torch: Any, module: Any, example_inputs: Sequence[Any], operator: str) -> set[Any]:
    """Return the nodes of a traced graph that call an operator of PyTorch; none if unknown.

    The graph has functions of Python, such as ``torch.linalg.eigh``. It is run with tensors
    without data, to see which operators each of them calls.
    """
    fake_tensors, dispatch = map(
        import_module, ("torch._subclasses.fake_tensor", "torch.utils._python_dispatch")
    )
    found: set[Any] = set()
    current: Any = None

    def run_node(self: Any, node: Any) -> Any:
        nonlocal current
        current = node
        return torch.fx.Interpreter.run_node(self, node)

    def watch(_mode: Any, called: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Some functions call an operator whose name begins with an underscore.
        if str(called).replace("._", ".") == operator.replace("._", "."):
            found.add(current)
        return called(*args, **(kwargs or {}))

    interpreter = type("Interpreter", (torch.fx.Interpreter,), {"run_node": run_node})
    watching = type("Watch", (dispatch.TorchDispatchMode,), {"__torch_dispatch__": watch})
    mode = fake_tensors.FakeTensorMode()
    inputs = [
        mode.from_tensor(item) if isinstance(item, torch.Tensor) else item.node.hint
        for item in example_inputs
    ]
    try:
        with mode, torch.no_grad(), watching():
            interpreter(module).run(*inputs)
    except Exception:  # of any type: an operator whose shapes depend on data, for example
        return set()
    return found


class _Part:
    """A part of a traced graph, compiled when it is called for the first time."""

    def __init__(self, part: Any, compile_part: Compile) -> None:
        """Note the part, a ``torch.fx.GraphModule``."""
        output = next(node for node in part.graph.nodes if node.op == "output")
        (results,) = output.args
        # Graphs of ``torch.compile`` return a tuple, a part with one result that result.
        self._single = isinstance(results, type(output))
        if self._single:
            output.args = ((results,),)
            part.recompile()
        self._part, self._compile = part, compile_part
        self._run: Callable[..., Any] | None = None
        self._lock = threading.Lock()

    def __call__(self, *inputs: Any) -> Any:
        """Run the part."""
        results = (self._run or self._compiled(inputs))(*inputs)
        return results[0] if self._single else results

    def _compiled(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        with self._lock:
            if self._run is None:
                self._run = self._compile(self._part, self._examples(inputs))
            return self._run

    def _examples(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the inputs, those that are numbers as the symbols of PyTorch's trace."""
        holders = [node for node in self._part.graph.nodes if node.op == "placeholder"]
        return [
            node.meta["example_value"] if isinstance(item, int) else item
            for node, item in zip(holders, inputs, strict=True)
        ]

"""Whether a compiled graph has the results of PyTorch for the inputs of its first call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from subgraph.errors import SubgraphError

# Difference of results, relative to the largest element, from which on they are not those of the
# same computation. Rounding to bfloat16 inside of a network gives less (estimate).
_SAME = 0.1


def difference(
    torch: Any,
    module: Any,
    run: Callable[..., Sequence[Any]],
    example_inputs: Sequence[Any],
    changed: Collection[int],
) -> str:
    """Return how results differ from those of PyTorch; "" if they do not.

    Args:
        torch: The module torch.
        module: The traced graph.
        run: Runs the same, compiled.
        example_inputs: Its inputs at the first call.
        changed: The positions of those that it changes in place, of which copies are used.
    """

    def inputs() -> list[Any]:
        found = [example_of(torch, x) for x in example_inputs]
        return [x.clone() if k in changed else x for k, x in enumerate(found)]

    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            with _stable_sorts(torch):
                wanted = module(*inputs())
        except Exception as error:  # of any type: the call raises it again
            return f"PyTorch raises {cause(error)}"
        try:
            found = run(*inputs())
        except SubgraphError as error:
            return f"{error}"
    for one, other in zip(found, wanted, strict=True):
        if not isinstance(other, torch.Tensor):
            if one != other:
                return f"a result is {one}, not {other}"
            continue
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return f"a result is {one.dtype} {[*one.shape]}, not {other.dtype} {[*other.shape]}"
        if one.numel():
            one, other = (x.double().nan_to_num(nan=0.0) for x in (one, other))
            far = float((one - other).abs().max()) / max(float(other.abs().max()), 1e-30)
            if far > _SAME:
                return f"a result differs from PyTorch's by {far:.2g} of its largest element"
    return ""


def _stable_sorts(torch: Any) -> Any:
    """Return a context in which PyTorch sorts equal elements as operators of ONNX do, by index.

    Otherwise their order is any, and differs between processors.
    """
    sorts = {torch.sort, torch.argsort, torch.Tensor.sort, torch.Tensor.argsort}

    def call(_mode: Any, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in sorts:  # which take the other arguments by name if they take ``stable``
            kwargs |= dict(zip(("dim", "descending"), args[1:], strict=False), stable=True)
            args = args[:1]
        return function(*args, **kwargs)

    base = torch.overrides.TorchFunctionMode
    return type("StableSorts", (base,), {"__torch_function__": call})()


def example_of(torch: Any, item: Any) -> Any:
    """Return the tensor or the number of the first call."""
    return item.node.hint if isinstance(item, torch.SymInt) else item


def cause(error: BaseException) -> str:
    """Return the type and the first line of the error behind ``error``."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"

"""What a precision costs: a model's results in less than float32 beside those in float32.

`subgraph accuracy` prints it: weights in bfloat16, integer kernels of a quantised model against its
own float arithmetic, and a quantised model against the model that it was made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from subgraph.errors import ConfigError
from subgraph.graph.graph import Graph
from subgraph.graph.types import Array

Run = Callable[[Mapping[str, Any]], Sequence[Array]]
_QUANTIZED = frozenset({"QuantizeLinear", "DequantizeLinear"})


@attrs.frozen
class Accuracy:
    """Differences of results from the true ones.

    Attributes:
        largest: Largest absolute difference.
        mean: Mean absolute difference.
        relative: ``largest`` divided by the largest magnitude of the true results.
        cosine: Cosine of the angle between all results and all true ones; 1 where both are zero.
        top1: Share of rows along the last axis of the first output whose largest element is in
            the same place; None where the last axis is no choice (fewer than two elements).
        elements: Number of elements compared.
    """

    largest: float
    mean: float
    relative: float
    cosine: float
    top1: float | None
    elements: int

    def row(self, precision: str) -> dict[str, Any]:
        """Return a row for a table."""
        return {
            "precision": precision,
            "largest difference": float(f"{self.largest:.3e}"),
            "mean difference": float(f"{self.mean:.3e}"),
            "relative": float(f"{self.relative:.3e}"),
            "cosine": round(self.cosine, 7),
            "same top-1": "" if self.top1 is None else f"{self.top1:.1%}",
        }


def compare(found: Sequence[Sequence[Array]], truth: Sequence[Sequence[Array]]) -> Accuracy:
    """Compare the results of several runs with the true ones.

    Args:
        found: For each run its outputs; only those of real numbers count.
        truth: The same of the precise model, of the same shapes.

    Raises:
        ConfigError: outputs differ in number or shape, or none has real numbers.
    """
    ours: list[Array] = []
    theirs: list[Array] = []
    hits: list[Array] = []
    for run, true_run in zip(found, truth, strict=True):
        if [a.shape for a in run] != [a.shape for a in true_run]:
            raise ConfigError(
                f"the models' outputs differ: {[a.shape for a in run]} and "
                f"{[a.shape for a in true_run]}; compare models with the same outputs"
            )
        for k, (array, true_array) in enumerate(zip(run, true_run, strict=True)):
            if not _real(array) or not _real(true_array):
                continue
            ours.append(np.asarray(array, np.float64).reshape(-1))
            theirs.append(np.asarray(true_array, np.float64).reshape(-1))
            if k == 0 and array.ndim and array.shape[-1] > 1:
                hits.append((array.argmax(-1) == true_array.argmax(-1)).reshape(-1))
    if not ours or not sum(a.size for a in ours):
        raise ConfigError("no output has real numbers to compare")
    a, b = np.concatenate(ours), np.concatenate(theirs)
    apart = np.abs(a - b)
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    same = bool(not a.any() and not b.any())
    return Accuracy(
        largest=float(apart.max()),
        mean=float(apart.mean()),
        relative=float(apart.max() / max(float(np.abs(b).max()), 1e-30)),
        cosine=1.0 if same else float(a @ b) / max(lengths, 1e-300),
        top1=float(np.concatenate(hits).mean()) if hits else None,
        elements=a.size,
    )


def _real(array: Array) -> bool:
    return array.dtype.kind == "f" or array.dtype.name in ("bfloat16", "uint8", "int8")


def is_quantized(graph: Graph) -> bool:
    """Return whether a model has conversions between bytes and real numbers."""
    return any(not node.domain and node.op_type in _QUANTIZED for node in graph.nodes)


def measure(
    runs: Mapping[str, Run], truth: Run, inputs: Iterable[Mapping[str, Any]]
) -> dict[str, Accuracy]:
    """Return the `Accuracy` of each of ``runs`` against ``truth`` over the same inputs, by name."""
    found: dict[str, list[Sequence[Array]]] = {name: [] for name in runs}
    true_results: list[Sequence[Array]] = []
    for arrays in inputs:
        true_results.append([np.array(a) for a in truth(arrays)])
        for name, run in runs.items():
            found[name].append([np.array(a) for a in run(arrays)])
    return {name: compare(results, true_results) for name, results in found.items()}

"""Accuracy of reduced precision: differences of a model's results from those in float32.

For `subgraph accuracy`, which compares weights of fewer bits with float32, integer kernels of a
quantised model with its float arithmetic, and a quantised model with its original.
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
    """Differences of results from those of the precise model.

    Attributes:
        largest: Largest absolute difference.
        mean: Mean absolute difference.
        relative: ``largest`` divided by the largest magnitude of the precise results.
        cosine: Cosine similarity of all results, flattened, and the precise ones; 1 if both are 0.
        top1: Share of rows along the last axis of the first output with the same argmax; None if
            that axis has fewer than two elements.
        elements: Number of compared elements.
    """

    largest: float
    mean: float
    relative: float
    cosine: float
    top1: float | None
    elements: int

    def row(self, precision: str) -> dict[str, Any]:
        """Return a row of a table, with a name of the precision."""
        return {
            "precision": precision,
            "largest difference": float(f"{self.largest:.3e}"),
            "mean difference": float(f"{self.mean:.3e}"),
            "relative": float(f"{self.relative:.3e}"),
            "cosine": round(self.cosine, 7),
            "same top-1": "" if self.top1 is None else f"{self.top1:.1%}",
        }


def compare(found: Sequence[Sequence[Array]], truth: Sequence[Sequence[Array]]) -> Accuracy:
    """Compare the results of several runs with those of the precise model.

    Args:
        found: The outputs of each run; only those of floats and bytes are compared.
        truth: The outputs of the precise model, of the same shapes.

    Raises:
        ConfigError: outputs differ in number or shape, or none is of floats or bytes.
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
    """Return whether a model has QuantizeLinear or DequantizeLinear."""
    return any(not node.domain and node.op_type in _QUANTIZED for node in graph.nodes)


def measure(
    runs: Mapping[str, Run], truth: Run, inputs: Iterable[Mapping[str, Any]]
) -> dict[str, Accuracy]:
    """Return the `Accuracy` of several runs by name.

    Args:
        runs: Functions from inputs by name to outputs, by the name of the run.
        truth: Such a function of the precise model.
        inputs: The samples, each with all inputs by name.

    Raises:
        ConfigError: outputs differ in number or shape, or none is of floats or bytes.
    """
    found: dict[str, list[Sequence[Array]]] = {name: [] for name in runs}
    true_results: list[Sequence[Array]] = []
    for arrays in inputs:
        true_results.append([np.array(a) for a in truth(arrays)])
        for name, run in runs.items():
            found[name].append([np.array(a) for a in run(arrays)])
    return {name: compare(results, true_results) for name, results in found.items()}

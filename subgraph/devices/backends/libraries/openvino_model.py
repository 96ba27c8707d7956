"""A compiled model of OpenVINO, and its runs on arrays of the caller."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from subgraph.devices.backends.libraries.translation import writable_view
from subgraph.graph.types import Array

# A tensor over the caller's memory takes 5 to 7 us (measured), in which 32 KB are copied.
_COPIED_BYTES = 1 << 15


class OpenvinoModel:
    """A compiled model; each runner has an infer request of its own."""

    def __init__(self, compiled: Any, library: Any, through: Mapping[int, int]) -> None:
        """Prepare to run a compiled model, given what `openvino_forms.passed_through` returns."""
        self._compiled = compiled
        self._tensor = library.Tensor
        self._through = through
        wide = library.Type.i64
        self._wide = [k for k, port in enumerate(compiled.inputs) if port.element_type == wide]
        self._copied = [k for k, port in enumerate(compiled.inputs) if _is_small(port)]
        # Shapes and dtypes of outputs that are written into arrays, not copied.
        self._written = {
            k: (tuple(port.shape), port.element_type.to_dtype())
            for k, port in enumerate(compiled.outputs)
            if k not in through and port.partial_shape.is_static and not _is_small(port)
        }

    def runner(self) -> Callable[[Sequence[Array], Sequence[Array | None]], Sequence[Array]]:
        """Return a function that runs an infer request on the caller's arrays, or small copies."""
        request, tensor = self._compiled.create_infer_request(), self._tensor
        through, wide, written = self._through, self._wide, self._written
        own = {k: request.get_input_tensor(k).data for k in self._copied}

        def call(arrays: Sequence[Array], into: Sequence[Array | None]) -> Sequence[Array]:
            # The request does not hold its arrays: the copies of this list live until it has run.
            passed = [*arrays]
            for k in wide:
                passed[k] = _clipped(passed[k])
            for k, array in enumerate(passed):
                place = own.get(k)
                if place is None:
                    shared = tensor(writable_view(array), shared_memory=True)
                    request.set_input_tensor(k, shared)
                elif place.shape != array.shape:  # np.copyto would broadcast it
                    raise ValueError(f"input {k} is {array.shape}, the model has {place.shape}")
                else:
                    np.copyto(place, array)
            results: list[Array | None] = [None] * len(into)
            for k, fixed in written.items():
                target = into[k]
                results[k] = array = np.empty(*fixed) if target is None else target
                request.set_output_tensor(k, tensor(array, shared_memory=True))
            request.infer(share_outputs=True)
            return [
                np.array(arrays[through[k]] if k in through else request.get_output_tensor(k).data)
                if result is None
                else result
                for k, result in enumerate(results)
            ]

        return call


def _is_small(port: Any) -> bool:
    """Return whether copying an input or output costs less than passing its memory."""
    if not port.partial_shape.is_static:
        return False
    size: int = math.prod(port.shape) * port.element_type.size
    return size <= _COPIED_BYTES


def _clipped(array: Array) -> Array:
    """Return indices or sizes, those beyond int32, in which OpenVINO computes, clipped."""
    return np.clip(array, -(1 << 31), (1 << 31) - 1)

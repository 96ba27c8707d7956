"""Operators that take and put elements by index, on the CPU: Gather*, Scatter*, OneHot, TopK."""

from __future__ import annotations

import math

from subgraph.engine.planner.lowering import Lowering, Operand, Unsupported, Word, lowering
from subgraph.engine.program.reports import Report
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.graph.symbolic import larger, smaller
from subgraph.ops.elementwise.cpu import cast_to
from subgraph.ops.elementwise.expressions import FLOATS, INTEGERS, text
from subgraph.ops.movement.copies_cpu import emit_copy
from subgraph.ops.movement.cpu import element_bytes, emit_view
from subgraph.ops.reduce.cpu import emit_minmax
from subgraph.ops.shared.range_check_cpu import emit_range_check
from subgraph.ops.shared.strides import contiguous, normal_axis

from .op import wraps

_TILE_BYTES = 16384
_WORDS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}
_SMALL = 4096  # elements that are worth a thread


def _check_indices(low: Lowering, indices: Operand) -> None:
    if indices.dtype not in ("int32", "int64"):
        raise Unsupported(f"{low.node.op_type} with indices of {indices.dtype}")


def _moved(operand: Operand) -> str:
    """Return the unsigned dtype as which elements are moved."""
    item = element_bytes(operand)
    if item == 16:
        raise Unsupported("indexing of complex numbers")
    return _WORDS[item]


@lowering("Gather")
def gather(node: Node, low: Lowering) -> None:
    """Take slices along an axis; a view for one known index in front."""
    x, indices, y = low.given(0), low.given(1), low.output()
    _check_indices(low, indices)
    axis = normal_axis(int(node.attrs.get("axis", 0)), x.rank)
    item = element_bytes(x)
    size = x.shape[axis]
    if y.size == 0:
        return
    if size == 0:
        raise Unsupported("Gather from an empty axis")
    steps = contiguous(x.shape)
    if indices.known is not None and indices.size == 1:
        index = int(indices.known.reshape(-1)[0])
        rest = (*steps[:axis], *(0 for _ in indices.shape), *steps[axis + 1 :])
        index = min(max(index + size if index < 0 else index, 0), size - 1)
        emit_view(low, rest, index * steps[axis])
        return
    inner = steps[axis]
    if item == 16:
        item, inner = 8, 2 * inner
    outer = math.prod(x.shape[:axis])
    block = larger(1, smaller(indices.size, _TILE_BYTES // (inner * item)))
    kernel = Kernel("subgraph.ops.indexing.kernels", "gather", item=item, index=indices.dtype)
    words: list[Word] = [x, indices, y, size, indices.size, inner, block, low.report("indices")]
    units = outer * -(-indices.size // block)
    grain = larger(1, _TILE_BYTES // (block * inner * item))
    low.emit(kernel, words, units, grain=grain, bytes=2 * y.nbytes + indices.nbytes)


def _element_words(
    data: Operand, indices: Operand, axis: int, item: int, report: Report
) -> list[Word]:
    """Return words 3 and on of the kernel ``elements``."""
    steps = [step * item for step in contiguous(data.shape)]
    rank = data.rank
    last = 0 if axis == rank - 1 else steps[-1]
    words: list[Word] = [data.shape[axis], steps[axis], indices.shape[-1], last, rank - 1]
    for d in range(rank - 1):
        words += [indices.shape[d], 0 if d == axis else steps[d]]
    return [*words, report]


@lowering("GatherElements")
def gather_elements(node: Node, low: Lowering) -> None:
    """Take single elements along an axis."""
    x, indices, y = low.given(0), low.given(1), low.output()
    _check_indices(low, indices)
    _emit_gather(low, x, indices, y, normal_axis(int(node.attrs.get("axis", 0)), x.rank))


def _emit_gather(low: Lowering, x: Operand, indices: Operand, y: Operand, axis: int) -> None:
    """Emit the step that takes single elements along an axis."""
    dtype = _moved(x)
    if y.size == 0:
        return
    words: list[Word] = [
        x,
        indices,
        y,
        *_element_words(x, indices, axis, x.itemsize, low.report("indices")),
    ]
    kernel = Kernel(
        "subgraph.ops.indexing.kernels",
        "elements",
        dtype=dtype,
        index=indices.dtype,
        scatter=False,
        reduction="none",
    )
    rows = indices.size // indices.shape[-1]
    grain = max(1, _SMALL // indices.shape[-1])
    low.emit(kernel, words, rows, grain=grain, bytes=2 * y.nbytes + indices.nbytes)


def _reduction(node: Node, dtype: str) -> tuple[str, str]:
    """Return the reduction and the dtype in which it is computed ("": elements are moved)."""
    reduction = text(node.attrs.get("reduction", "none"))
    if reduction == "none":
        return reduction, ""
    if dtype not in (*FLOATS, *INTEGERS):
        raise Unsupported(f"{node.op_type} with reduction {reduction} of {dtype}")
    return reduction, dtype


def _copy_data(low: Lowering, x: Operand, y: Operand) -> None:
    steps = contiguous(x.shape)
    emit_copy(low, x, y, x.shape, steps, steps, item=element_bytes(x))


@lowering("ScatterElements", "Scatter")
def scatter_elements(node: Node, low: Lowering) -> None:
    """Put single elements along an axis of a copy."""
    x, indices, updates, y = low.given(0), low.given(1), low.given(2), low.output()
    _check_indices(low, indices)
    axis = normal_axis(int(node.attrs.get("axis", 0)), x.rank)
    reduction, computed = _reduction(node, x.dtype)
    dtype = computed or _moved(x)
    _copy_data(low, x, y)
    if indices.size == 0 or y.size == 0:
        return
    words: list[Word] = [
        y,
        indices,
        updates,
        *_element_words(x, indices, axis, x.itemsize, low.report("indices")),
    ]
    kernel = Kernel(
        "subgraph.ops.indexing.kernels",
        "elements",
        dtype=dtype,
        index=indices.dtype,
        scatter=True,
        reduction=reduction,
    )
    low.emit(kernel, words, 1, bytes=3 * updates.nbytes)


def _nd_words(
    data: Operand, indices: Operand, batch_dims: int, item: int, report: Report
) -> tuple[list[Word], int]:
    """Return words 3 and on of the kernel ``nd``, and the number of index tuples."""
    depth = indices.shape[-1]
    steps = [step * item for step in contiguous(data.shape)]
    tuples = indices.size // depth if depth else math.prod(indices.shape[:-1])
    batches = math.prod(data.shape[:batch_dims])
    inner = math.prod(data.shape[batch_dims + depth :])
    batch = math.prod(data.shape[batch_dims:]) * item
    words: list[Word] = [tuples, inner, max(1, tuples // max(batches, 1)), batch, depth]
    for d in range(batch_dims, batch_dims + depth):
        words += [data.shape[d], steps[d]]
    return [*words, report], tuples


@lowering("GatherND")
def gather_nd(node: Node, low: Lowering) -> None:
    """Take slices by index tuples."""
    x, indices, y = low.given(0), low.given(1), low.output()
    dtype = _moved(x)
    if y.size == 0:
        return
    if indices.dtype != "int64":
        raise Unsupported(f"GatherND with indices of {indices.dtype}")
    rest, tuples = _nd_words(
        x, indices, int(node.attrs.get("batch_dims", 0)), x.itemsize, low.report("indices")
    )
    kernel = Kernel(
        "subgraph.ops.indexing.kernels", "nd", dtype=dtype, scatter=False, reduction="none"
    )
    words: list[Word] = [x, indices, y, *rest]
    grain = max(1, _SMALL // max(y.size // tuples, 1))
    low.emit(kernel, words, tuples, grain=grain, bytes=2 * y.nbytes + indices.nbytes)


@lowering("ScatterND")
def scatter_nd(node: Node, low: Lowering) -> None:
    """Put slices by index tuples into a copy."""
    x, indices, updates, y = low.given(0), low.given(1), low.given(2), low.output()
    reduction, computed = _reduction(node, x.dtype)
    dtype = computed or _moved(x)
    if indices.dtype != "int64":
        raise Unsupported(f"ScatterND with indices of {indices.dtype}")
    _copy_data(low, x, y)
    if updates.size == 0 or y.size == 0:
        return
    rest, _ = _nd_words(x, indices, 0, x.itemsize, low.report("indices"))
    kernel = Kernel(
        "subgraph.ops.indexing.kernels", "nd", dtype=dtype, scatter=True, reduction=reduction
    )
    low.emit(kernel, [y, indices, updates, *rest], 1, bytes=2 * updates.nbytes)


@lowering("TensorScatter")
def tensor_scatter(node: Node, low: Lowering) -> None:
    """Put the rows of an update into a copy of a cache, for each sample from a place of its own."""
    cache, update, first, y = low.given(0), low.given(1), low.optional(2), low.output()
    axis = normal_axis(int(node.attrs.get("axis", -2)), cache.rank)
    if axis == 0:
        raise Unsupported("TensorScatter along the samples")
    _copy_data(low, cache, y)
    if update.size == 0 or y.size == 0:
        return
    if first is not None and text(node.attrs.get("mode", "linear")) != "circular":
        emit_range_check(low, first, "write_indices", 0, cache.shape[axis] - update.shape[axis])
    row = math.prod(cache.shape[axis + 1 :]) * element_bytes(cache)
    groups = math.prod(cache.shape[1:axis])
    words: list[Word] = [y, update, first or 0, groups, cache.shape[axis], update.shape[axis], row]
    circular = text(node.attrs.get("mode", "linear")) == "circular"
    kernel = Kernel(
        "subgraph.ops.indexing.kernels", "into_cache", circular=circular, indexed=first is not None
    )
    low.emit(kernel, words, cache.shape[0] * groups, bytes=2 * update.nbytes)


@lowering("OneHot")
def one_hot(node: Node, low: Lowering) -> None:
    """Mark an index along a new axis."""
    indices, values, y = low.given(0), low.given(2), low.output()
    item = element_bytes(y)
    if y.size == 0:
        return
    if indices.dtype not in (*FLOATS, *INTEGERS) or item == 16:
        raise Unsupported(f"OneHot of {indices.dtype} to {y.dtype}")
    axis = normal_axis(int(node.attrs.get("axis", -1)), y.rank)
    given = cast_to(low, indices, "int64")
    inner = math.prod(indices.shape[axis:])
    depth = y.shape[axis]
    kernel = Kernel("subgraph.ops.indexing.kernels", "one_hot", item=item)
    units = indices.size // inner
    grain = max(1, _SMALL // (depth * inner))
    words: list[Word] = [given, values, y, depth, inner, int(wraps(node))]
    low.emit(kernel, words, units, grain=grain, bytes=y.nbytes)


@lowering("TopK", dtypes=("float32", "float64", *INTEGERS))
def top_k(node: Node, low: Lowering) -> None:
    """Take the largest or smallest elements along an axis, in order."""
    x, values, places = low.given(0), low.output(), low.output(1)
    axis = normal_axis(int(node.attrs.get("axis", -1)), x.rank)
    if values.size == 0:
        return
    k = values.shape[axis]
    inner = math.prod(x.shape[axis + 1 :])
    largest = bool(node.attrs.get("largest", 1))
    if k == 1 and (largest or x.dtype in INTEGERS):  # to TopK as to ArgMax, NaN is the largest
        emit_minmax(low, x, places, x.shape[axis], inner, largest=largest, last=False)
        _emit_gather(low, x, places, values, axis)
        return
    wide = x.itemsize > 4 or x.shape[axis] >= 1 << 32
    scratch = low.scratch((32 if wide else 16) * k, per_worker=True)
    words: list[Word] = [x, values, places, x.shape[axis], inner, k, scratch, scratch.nbytes]
    if wide:
        kernel = Kernel(
            "subgraph.ops.selection.top_kernels", "wide_keys", dtype=x.dtype, largest=largest
        )
    else:
        lanes = low.lanes(x.dtype)
        kernel = Kernel(
            "subgraph.ops.selection.top_kernels",
            "keys",
            dtype=x.dtype,
            lanes=lanes,
            largest=largest,
        )
    units = x.size // x.shape[axis]
    low.emit(kernel, words, units, grain=max(1, _SMALL // x.shape[axis]), bytes=x.nbytes)

"""Arguments of the kernels that gather and scatter elements by index."""

from __future__ import annotations

from subgraph.engine.codegen.arguments import Address, KernelArguments, ReportWords, Words


class GatherArguments(KernelArguments):
    """Arguments of `gather`; a work unit is a tile of indices at one outer index.

    Attributes:
        data: First element of ``[outer][size][inner]``.
        indices: First index.
        y: First element of ``[outer][count][inner]``.
        size: Slices along the axis.
        count: Number of indices.
        inner: Elements of a slice.
        block: Indices of a tile.
        report: Where an index out of range is reported.
    """

    data: Address
    indices: Address
    y: Address
    size: int
    count: int
    inner: int
    block: int
    report: ReportWords


class ElementsArguments(KernelArguments):
    """Arguments of `elements`; a work unit is a row of indices to gather, or all rows to scatter.

    Attributes:
        data: First element of the data.
        indices: First index.
        y: First element of the gathered result, or of the updates to scatter; shaped as the
            indices.
        size: Elements of the data along the axis.
        along: Bytes between them.
        row_size: Indices of a row: the size of the last dimension.
        row_step: Bytes along the last dimension of the data; 0 if that is the axis.
        report: Where an index out of range is reported.
        outer: Number of outer dimensions.
        dims: Two numbers for each outer dimension: its size in the indices, and its stride in the
            data in bytes (0 for the axis).
    """

    data: Address
    indices: Address
    y: Address
    size: int
    along: int
    row_size: int
    row_step: int
    report: ReportWords
    outer: int
    dims: Words


class TuplesArguments(KernelArguments):
    """Arguments of `nd`; a work unit is an index tuple to gather, or all tuples to scatter.

    Attributes:
        data: First element of the data.
        indices: First index, int64.
        y: First element of the gathered slices, or of the updates to scatter.
        tuples: Number of tuples.
        inner: Elements of a slice.
        batch_tuples: Tuples of a batch.
        batch_step: Bytes of a batch in the data.
        report: Where an index out of range is reported.
        depth: Indices of a tuple.
        dims: Two numbers for each index of a tuple: the size of its dimension, and the stride in
            bytes.
    """

    data: Address
    indices: Address
    y: Address
    tuples: int
    inner: int
    batch_tuples: int
    batch_step: int
    report: ReportWords
    depth: int
    dims: Words


class OneHotArguments(KernelArguments):
    """Arguments of `one_hot`; a work unit is one index along the dimensions outside the new axis.

    Attributes:
        indices: First index, int64, ``[units][inner]``.
        values: Two elements: the value elsewhere, and the value at the index.
        y: First element of ``[units][depth][inner]``.
        depth: Elements along the new axis.
        inner: Indices inside the new axis.
        wraps: Whether negative indices count from the end (0 or 1).
    """

    indices: Address
    values: Address
    y: Address
    depth: int
    inner: int
    wraps: int


class TensorScatterArguments(KernelArguments):
    """Arguments of `tensor_scatter`; a work unit is a group of a sample.

    Attributes:
        cache: First byte of ``[samples][groups][positions]`` rows.
        update: First byte of ``[samples][groups][count]`` rows.
        firsts: The position in the cache of each sample's first row, int64; 0: all are position 0.
        groups: Groups of a sample: the product of the dimensions between samples and axis.
        positions: Rows of a group of the cache.
        count: Rows of a group of the update.
        row_bytes: Bytes of a row.
    """

    cache: Address
    update: Address
    firsts: Address
    groups: int
    positions: int
    count: int
    row_bytes: int

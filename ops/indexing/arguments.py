"""Arguments of the kernels that take and put elements by index."""

from __future__ import annotations

from subgraph.engine.codegen.arguments import Address, KernelArguments, ReportWords, Words


class GatherArguments(KernelArguments):
    """Arguments of `gather`; a work unit is a tile of indices, of an outer index.

    Attributes:
        data: First element of ``[outer][size][inner]``.
        indices: First index.
        y: First element of ``[outer][count][inner]``.
        size: Slices along the axis.
        count: Number of indices.
        inner: Elements of a slice.
        block: Indices of a unit.
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
    """Arguments of `elements`; a work unit is a row of the indices, or all rows that are scattered.

    Attributes:
        data: First element of the data.
        indices: First index.
        y: First element of the result that is gathered, or of the updates; shaped as the indices.
        size: Elements of the data along the axis.
        along: Bytes between them.
        row_size: Indices of a row: the size of the last dimension.
        row_step: Bytes along the last dimension of the data; 0: that is the axis.
        report: Where an index out of range is reported.
        outer: Number of outer dimensions.
        dims: For each outer dimension of the indices its size, and bytes in the data; 0: that is
            the axis.
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
    """Arguments of `nd`; a work unit is a tuple of indices, or all slices that are scattered.

    Attributes:
        data: First element of the data.
        indices: First index, int64.
        y: First element of the slices that are gathered, or of the updates.
        tuples: Number of tuples.
        inner: Elements of a slice.
        batch_tuples: Tuples of a batch.
        batch_step: Bytes of a batch in the data.
        report: Where an index out of range is reported.
        depth: Indices of a tuple.
        dims: For each index of a tuple the size of its dimension, and bytes along it.
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
    """Arguments of `one_hot`; a work unit is an index outside the new axis.

    Attributes:
        indices: First index, int64, ``[units][inner]``.
        values: Two elements: what is written elsewhere, and where an index says.
        y: First element of ``[units][depth][inner]``.
        depth: Elements along the new axis.
        inner: Indices inside the new axis.
        wraps: Whether negative indices count from the end.
    """

    indices: Address
    values: Address
    y: Address
    depth: int
    inner: int
    wraps: int


class IntoCacheArguments(KernelArguments):
    """Arguments of `into_cache`; a work unit is a group of a sample.

    Attributes:
        cache: First byte of ``[samples][groups][positions]`` rows.
        update: First byte of ``[samples][groups][count]`` rows.
        firsts: The position of the first row of each sample, int64, if positions are given.
        groups: Groups of a sample.
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

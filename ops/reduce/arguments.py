"""Arguments of the kernels that reduce, search and accumulate along axes."""

from __future__ import annotations

from subgraph.engine.codegen.arguments import Address, KernelArguments, Words


class ReductionArguments(KernelArguments):
    """Arguments of `rows` and `columns`.

    A work unit of `rows` is an element of y; one of `columns` is a tile of ``4 * lanes`` contiguous
    elements of y, of an index of the other kept dimensions.

    Attributes:
        x: The elements that are reduced.
        y: The results, contiguous.
        shifts: For "sumexp" what is subtracted before exp, one for each element of y; else 0.
        size: Contiguous elements: `rows` reduces them, `columns` keeps them.
        kept: Number of other kept dimensions.
        reduced: Number of other reduced dimensions.
        iterations: Product of the sizes of the other reduced dimensions.
        count: Elements that are reduced to one, the divisor of "mean".
        dims: For each of the other kept, then of the other reduced dimensions its size, its bytes
            in x, and 0.
    """

    x: Address
    y: Address
    shifts: Address
    size: int
    kept: int
    reduced: int
    iterations: int
    count: int
    dims: Words


class ArgMinMaxArguments(KernelArguments):
    """Arguments of `argminmax_columns` and `argminmax_rows`.

    A work unit of `argminmax_columns` is a tile of ``lanes`` elements inside the axis, of an outer
    index; one of `argminmax_rows` is an outer index.

    Attributes:
        x: The elements that are searched, ``[outer][size][inner]``.
        y: Their indices along the axis, ``[outer][inner]``, int64.
        size: Elements along the axis.
        inner: Elements inside the axis; 1 for `argminmax_rows`.
    """

    x: Address
    y: Address
    size: int
    inner: int


class CumulativeArguments(KernelArguments):
    """Arguments of `cumulative`; a work unit is a tile of ``4 * lanes`` elements inside the axis.

    Tiles are innermost, then the dimensions outside the axis.

    Attributes:
        x: The elements, ``[outer][size][inner]``.
        y: The running sums or products, shaped as x.
        size: Elements along the axis.
        inner: Elements inside the axis.
        reverse: 1 to accumulate from the end of the axis, else 0.
        exclusive: 1 to exclude the element itself, else 0.
    """

    x: Address
    y: Address
    size: int
    inner: int
    reverse: int
    exclusive: int

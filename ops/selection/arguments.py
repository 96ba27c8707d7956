"""Arguments of the kernels of TopK, and of operators whose output size depends on values."""

from __future__ import annotations

from subgraph.engine.codegen.arguments import Address, KernelArguments, Words


class TopKArguments(KernelArguments):
    """Arguments of `keys` and `wide_keys`; a work unit is a line along the axis.

    Attributes:
        x: First element of ``[outer][size][inner]``.
        values: First element of ``[outer][k][inner]``.
        indices: The index of each value along the axis, int64.
        size: Elements along the axis.
        inner: Elements inside the axis.
        k: Elements to select of a line.
        scratch: Scratch of the first worker: k times two int64 for `keys`, four for `wide_keys`.
        scratch_bytes: Bytes from a worker's scratch to the next one's.
    """

    x: Address
    values: Address
    indices: Address
    size: int
    inner: int
    k: int
    scratch: Address
    scratch_bytes: int


class NonZeroArguments(KernelArguments):
    """Arguments of `non_zero`; there is one work unit.

    Attributes:
        x: First element.
        indices: The indices of the elements that are not zero, int64, ``[rank][size]``.
        count: Number of these elements, one int64.
        size: Elements of x.
        rank: Dimensions of x.
        dims: Their sizes.
    """

    x: Address
    indices: Address
    count: Address
    size: int
    rank: int
    dims: Words


class CompressArguments(KernelArguments):
    """Arguments of `compress`; there is one work unit.

    Attributes:
        x: First byte of ``[outer][size]`` slices.
        conditions: First condition, bool.
        y: First byte of ``[outer][room]`` slices.
        count: Number of true conditions, one int64.
        outer: Product of the sizes before the axis.
        size: Slices of x along the axis.
        slice_bytes: Bytes of a slice.
        sought: Number of conditions.
        room: Slices of y along the axis.
        scratch: An int64 for each condition.
    """

    x: Address
    conditions: Address
    y: Address
    count: Address
    outer: int
    size: int
    slice_bytes: int
    sought: int
    room: int
    scratch: Address


class UniqueArguments(KernelArguments):
    """Arguments of `unique`; there is one work unit.

    Attributes:
        x: First element of the rows.
        y: First element of the distinct rows.
        first: The row at which each distinct row appears first, int64.
        inverse: For each row the number of its distinct row, int64.
        counts: The number of rows equal to each distinct row, int64.
        count: Number of distinct rows, one int64.
        rows: Number of rows.
        length: Elements of a row.
        order: Scratch of two int64 for each row.
        table: Scratch of four int64 for each row, and 64 more.
    """

    x: Address
    y: Address
    first: Address
    inverse: Address
    counts: Address
    count: Address
    rows: int
    length: int
    order: Address
    table: Address


class SuppressArguments(KernelArguments):
    """Arguments of `suppress`; a work unit is a class of an image.

    Attributes:
        boxes: First coordinate of ``[images][boxes][4]``, float32.
        scores: First score of ``[images][classes][boxes]``, float32.
        most: Boxes of a class to select at most, one int64; 0: select none.
        overlap: Intersection over union beyond which a box is suppressed, one float32; 0: beyond 0.
        least: Score that a box must exceed, one float32; 0: no threshold.
        picked: The selected boxes of each class, int64, ``[units][room]``.
        counts: Their number for each class, int64.
        number: Boxes of an image.
        classes: Classes of an image.
        room: Boxes of a class that `picked` holds.
        scratch: Scratch of the first worker: 8 bytes for each box, then 20 for each box and each
            lane of a vector.
        scratch_bytes: Bytes from a worker's scratch to the next one's.
    """

    boxes: Address
    scores: Address
    most: Address
    overlap: Address
    least: Address
    picked: Address
    counts: Address
    number: int
    classes: int
    room: int
    scratch: Address
    scratch_bytes: int


class GatherPickedArguments(KernelArguments):
    """Arguments of `gather_picked`; there is one work unit.

    Attributes:
        picked: The selected boxes of each class, int64, ``[units][room]``.
        counts: Their number for each class, int64.
        y: Image, class and box of each selected box, int64.
        count: Number of all selected boxes, one int64.
        units: Images times classes.
        classes: Classes of an image.
        room: Boxes of a class that `picked` holds.
    """

    picked: Address
    counts: Address
    y: Address
    count: Address
    units: int
    classes: int
    room: int

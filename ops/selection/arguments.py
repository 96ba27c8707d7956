"""Arguments of the kernels that choose elements: TopK, and those that count what they find."""

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
        k: Elements that are wanted of a line.
        scratch: Scratch of the first worker: two int64 for each of k, four for `wide_keys`.
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
        indices: The index of each element that is found, int64, ``[rank][size]``.
        count: How many there are, one int64.
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
        count: How many conditions are true, one int64.
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
        first: The row at which each of them appears first, int64.
        inverse: For each row the number of its distinct row, int64.
        counts: How often each distinct row appears, int64.
        count: How many distinct rows there are, one int64.
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
        boxes: First number of ``[images][boxes][4]``, float32.
        scores: First number of ``[images][classes][boxes]``, float32.
        most: How many boxes of a class are wanted, one int64; 0: none.
        overlap: Intersection over union that suppresses, one float32; 0: any.
        least: Score that a box must exceed, one float32; 0: there is none.
        picked: The boxes of each class that are picked, int64, ``[units][room]``.
        counts: How many they are, int64.
        number: Boxes of an image.
        classes: Classes of an image.
        room: Boxes of a class that are picked at most.
        scratch: Scratch of the first worker: 8 bytes a box, then 20 for each box that is picked
            and each lane of a vector.
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
        picked: The boxes of each class that are picked, int64, ``[units][room]``.
        counts: How many they are, int64.
        y: Image, class and box of each, int64.
        count: How many there are in all, one int64.
        units: Images times classes.
        classes: Classes of an image.
        room: Boxes of a class that are picked at most.
    """

    picked: Address
    counts: Address
    y: Address
    count: Address
    units: int
    classes: int
    room: int

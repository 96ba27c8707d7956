"""Arguments of the kernel of DFT and STFT."""

from __future__ import annotations

from subgraph.engine.codegen.arguments import Address, KernelArguments, Words


class LinesArguments(KernelArguments):
    """Arguments of `lines`; a work unit is one line: one transform.

    Lines are numbered by an outer index and an index within it. Strides are in elements of x and y.

    Attributes:
        x: First element of the samples.
        y: First element of the results.
        window: A factor for each sample; 0: none.
        table: ``exp(-2 pi i k / size)`` for each k below the size, float64.
        samples: Samples to read of a line; the others are 0.
        size: Length of the transform.
        results: Results to write of a line.
        x_numbers: Elements of a sample: 1 (real) or 2 (complex).
        y_numbers: Elements of a result.
        x_step: Stride of x between samples.
        y_step: Stride of y between results.
        lines: Lines of an outer index.
        x_outer: Stride of x between outer indices.
        y_outer: Stride of y between outer indices.
        x_line: Stride of x between lines.
        y_line: Stride of y between lines.
        hermitian: Whether x is the first half of a line with Hermitian symmetry (0 or 1).
        direction: 1 forward, -1 inverse.
        scratch: Scratch of the first worker: two buffers of ``size`` complex float64.
        scratch_bytes: Bytes from a worker's scratch to the next one's.
        factor_count: Number of factors.
        factors: The factors of the size.
    """

    x: Address
    y: Address
    window: Address
    table: Address
    samples: int
    size: int
    results: int
    x_numbers: int
    y_numbers: int
    x_step: int
    y_step: int
    lines: int
    x_outer: int
    y_outer: int
    x_line: int
    y_line: int
    hermitian: int
    direction: int
    scratch: Address
    scratch_bytes: int
    factor_count: int
    factors: Words

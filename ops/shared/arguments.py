"""Arguments of the kernels that several families use."""

from __future__ import annotations

from subgraph.engine.codegen.arguments import Address, KernelArguments, ReportWords


class InRangeArguments(KernelArguments):
    """Arguments of `in_range`; there is one work unit.

    Attributes:
        values: First of the values.
        count: How many are checked.
        step: Elements from one to the next.
        least: The least value that is allowed.
        most: The greatest value that is allowed.
        also: A value that is allowed besides.
        report: Where a value out of range is reported.
    """

    values: Address
    count: int
    step: int
    least: int
    most: int
    also: int
    report: ReportWords

"""Arguments of the kernel that checks values."""

from __future__ import annotations

from subgraph.engine.codegen.arguments import Address, KernelArguments, ReportWords


class InRangeArguments(KernelArguments):
    """Arguments of `in_range`; there is one work unit.

    Attributes:
        values: First value.
        count: Number of values.
        step: Elements from one value to the next.
        least: Least allowed value.
        most: Greatest allowed value.
        also: One more allowed value.
        report: The run's report slot and the report's number.
    """

    values: Address
    count: int
    step: int
    least: int
    most: int
    also: int
    report: ReportWords

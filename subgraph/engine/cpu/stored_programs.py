"""Strategy: a program from an exported model, for shapes with which the model ran before export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from subgraph.engine.executable.stored_program import StoredProgram, read
from subgraph.engine.region.strategy import Declined, Request, Strategy
from subgraph.graph.parameters import Parameter
from subgraph.graph.types import TensorType
from subgraph.operators.subgraph_op import ImportFile


class StoredPrograms(Strategy):
    """The programs of an exported model.

    They are asked before strategies that fuse the graph, because they do not need the fused graph.
    They depend on weights only, so that nothing is forgotten when the graph is fused again.
    """

    name = "stored program"

    def __init__(self) -> None:
        """Begin without programs."""
        self._programs: list[StoredProgram] = []

    def read(
        self, stored: Sequence[Mapping[str, Any]], file: ImportFile, parameters: Sequence[Parameter]
    ) -> None:
        """Take the programs of a file, except those whose kernels have changed since.

        Args:
            stored: Their descriptions (`subgraph.engine.executable.stored_program`).
            file: The file.
            parameters: The parameters of the region.
        """
        found = (read(each, file, parameters) for each in stored)
        self._programs = [program for program in found if program is not None]

    def resolve(self, request: Request) -> StoredProgram | None:
        """Return the program for the types of the request; None if there are no programs.

        Raises:
            Declined: It was made for other weights, or no program is for these types.
        """
        if not self._programs:
            return None
        for program in self._programs:
            if program.fits(request.inputs):
                if program.is_current(request.snapshot):
                    return program
                self._programs = [each for each in self._programs if each is not program]
                raise Declined("weights have changed since the file was written")
        raise Declined("the file has no program for these shapes")

    def take_types(self) -> list[list[TensorType]]:
        """Return the types of the inputs of each program, and drop all programs."""
        programs, self._programs = self._programs, []
        return [[TensorType(e.dtype, e.shape) for e in p.layout.inputs] for p in programs]

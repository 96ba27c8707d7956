"""A model as a graph of oneDNN: partitions compiled for each shape, and their runs."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_size_t, c_void_p
from typing import Any

import attrs
import numpy as np

from subgraph.devices.backends.libraries import onednn_graph
from subgraph.devices.backends.libraries.onednn_graph import Form, Library, LogicalTensor
from subgraph.devices.backends.libraries.translation import (
    Programs,
    Shapes,
    node_attributes,
    openmp_threads,
    parsed_model,
    result_array,
)
from subgraph.graph.types import Array


@attrs.frozen(eq=False)
class _Program:
    """The compiled partitions of a model for one set of input shapes.

    Attributes:
        steps: Compiled partitions with the identities of their inputs and outputs.
        tensors: The tensors by identity, with sizes and layouts.
    """

    steps: list[tuple[c_void_p, list[int], list[int]]]
    tensors: dict[int, LogicalTensor]


class OnednnModel:
    """A graph of oneDNN, whose partitions are compiled when a shape is first run."""

    def __init__(self, library: Library, model: bytes, threads: int) -> None:
        """Translate a model and let oneDNN cut it into partitions.

        Args:
            library: The loaded library.
            model: A serialized ONNX model.
            threads: Threads of a run; 0 for the library's own choice.
        """
        body, version, weights = parsed_model(model)
        self._library = library
        self._threads = threads
        self._numbers: dict[str, int] = {}
        self._constants = {
            self._number(name): np.ascontiguousarray(array)
            for name, array in weights.items()
            if array.dtype == np.float32
        }
        ports = [p for p in body.input if p.name not in weights]
        self._inputs = [self._number(port.name) for port in ports]
        graph = library.made("graph_graph_create", c_int(1))
        weakref.finalize(self, library, "graph_graph_destroy", graph)
        self._add_nodes(graph, body, version, weights)
        self._outputs = [self._number(port.name) for port in body.output]
        # An "end" operation keeps an output from being fused away.
        for k, port in enumerate(body.output):
            tensor, number = self._logical(port.name), len(body.node) + k
            onednn_graph.add_operation(library, graph, ("end", {}), number, ((tensor,), ()))
        self._partitions = onednn_graph.partitions_of(library, graph)
        for partition in self._partitions:
            weakref.finalize(self, library, "graph_partition_destroy", partition)
        self._programs: Programs[_Program] = Programs()

    def _number(self, name: str) -> int:
        """Return the identity of a tensor."""
        return self._numbers.setdefault(name, len(self._numbers))

    def _add_nodes(
        self, graph: c_void_p, body: Any, version: int, weights: dict[str, Array]
    ) -> None:
        shapes: dict[str, tuple[int, ...]] = {
            info.name: tuple(dim.dim_value for dim in info.type.tensor_type.shape.dim)
            for info in (*body.input, *body.value_info, *body.output)
        }
        shapes.update({name: array.shape for name, array in weights.items()})
        for k, (node, bias, results) in enumerate(onednn_graph.with_biases(body, shapes)):
            form = Form(
                node_attributes(node),
                version,
                [len(shapes[name]) if name else -1 for name in node.input],
                {
                    place: weights[name].reshape(-1).tolist()
                    for place, name in enumerate(node.input)
                    if name in weights and weights[name].size <= 64
                },
                len(node.output),
            )
            kind, chosen, attributes = onednn_graph.OPERATORS[node.op_type](form)
            names = [*[node.input[place] for place in chosen], bias]
            inputs = [self._logical(name) for name in names if name]
            outputs = [self._logical(name) for name in results]
            onednn_graph.add_operation(
                self._library, graph, (kind, attributes), k, (inputs, outputs)
            )

    def _logical(self, name: str) -> LogicalTensor:
        number = self._number(name)
        constant = self._constants.get(number)
        shape = None if constant is None else constant.shape
        return onednn_graph.logical(number, shape, constant=constant is not None)

    def _compiled(self, shapes: Shapes) -> _Program:
        """Return the partitions, compiled for shapes of the inputs."""
        known = {
            number: onednn_graph.logical(number, shape)
            for number, shape in zip(self._inputs, shapes, strict=True)
        }
        for number, array in self._constants.items():
            known[number] = onednn_graph.logical(number, array.shape, constant=True)
        steps: list[tuple[c_void_p, list[int], list[int]]] = []
        waiting = list(self._partitions)
        while waiting:
            partition = next(p for p in waiting if known.keys() >= {*self._ports(p, "input")})
            waiting.remove(partition)
            taken, given = self._ports(partition, "input"), self._ports(partition, "output")
            outputs = [onednn_graph.logical(number, None) for number in given]
            for tensor in outputs:
                if tensor.id not in self._outputs:
                    onednn_graph.free_layout(tensor)
            made, outputs = onednn_graph.compiled(
                self._library, partition, [known[number] for number in taken], outputs
            )
            known.update({tensor.id: tensor for tensor in outputs})
            steps.append((made, taken, given))
        program = _Program(steps, known)
        for made, _, _ in steps:
            weakref.finalize(program, self._library, "graph_compiled_partition_destroy", made)
        return program

    def _ports(self, partition: c_void_p, way: str) -> list[int]:
        return onednn_graph.ports_of(self._library, partition, way)

    def runner(self) -> Callable[[Sequence[Array], Sequence[Array | None]], Sequence[Array]]:
        """Return a function that runs the partitions one after the other."""
        library, outputs = self._library, self._outputs
        stream = library.made("stream_create", library.engine, c_int(1))
        runs: dict[Shapes, _Run] = {}

        def call(arrays: Sequence[Array], into: Sequence[Array | None]) -> Sequence[Array]:
            threads = openmp_threads(self._threads)
            if threads:
                library.set_threads(threads)
            shapes = tuple(array.shape for array in arrays)
            # A program runs on the number of threads that it was compiled with.
            key = (*shapes, (threads,))
            run = runs.get(key)
            if run is None:
                runs.clear()
                program = self._programs.get(key, lambda key: self._compiled(key[:-1]))
                run = runs[key] = _Run(library, program, self._constants, outputs)
            tensors = run.program.tensors
            targets = [
                result_array(target, tensors[number].shape)
                for number, target in zip(outputs, into, strict=True)
            ]
            for number, array in zip((*self._inputs, *outputs), (*arrays, *targets), strict=True):
                run.place(number, array)
            for compiled, taken, given in run.steps:
                library(
                    "graph_compiled_partition_execute",
                    *(compiled, stream, c_size_t(len(taken)), taken, c_size_t(len(given)), given),
                )
            library("stream_wait", stream)
            return targets

        weakref.finalize(call, library, "stream_destroy", stream)
        return call


class _Run:
    """One request's tensors for a program: memory between partitions, and handles of all."""

    def __init__(
        self,
        library: Library,
        program: _Program,
        constants: dict[int, Array],
        outputs: Sequence[int],
    ) -> None:
        self.program = program
        self._library = library
        self._handles: dict[int, c_void_p] = {}
        self._memory: list[Array] = []
        for number, tensor in program.tensors.items():
            array = constants.get(number)
            made_here = any(number in given for _, _, given in program.steps)
            if array is None and made_here and number not in outputs:
                size = c_size_t()
                library("graph_logical_tensor_get_mem_size", byref(tensor), byref(size))
                array = np.empty(size.value, np.uint8)
                self._memory.append(array)
            address = c_void_p(None if array is None else array.ctypes.data)
            handle = library.made("graph_tensor_create", byref(tensor), library.engine, address)
            self._handles[number] = handle
            weakref.finalize(self, library, "graph_tensor_destroy", handle)
        self.steps = [
            (compiled, self._row(taken), self._row(given))
            for compiled, taken, given in program.steps
        ]

    def _row(self, numbers: Sequence[int]) -> ctypes.Array[c_void_p]:
        return (c_void_p * len(numbers))(*[self._handles[number] for number in numbers])

    def place(self, number: int, array: Array) -> None:
        """Use the memory of an array for a tensor."""
        handle = self._handles[number]
        self._library("graph_tensor_set_data_handle", handle, c_void_p(array.ctypes.data))

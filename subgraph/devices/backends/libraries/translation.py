"""What the models of libraries share: programs by shape, refusals, and arrays."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Container, Mapping
from typing import Any, Generic, TypeVar

import attrs
import numpy as np

from subgraph.graph.graph import Node
from subgraph.graph.types import Array, TensorType
from subgraph.system.forking import free_in_child, parent_had_threads_beside

_MAX_SHAPES = 16  # sets of input shapes whose programs a model caches
Shapes = tuple[tuple[int, ...], ...]
Program = TypeVar("Program")


class Programs(Generic[Program]):
    """The programs of a model by the shapes of its inputs; several threads may use them."""

    def __init__(self) -> None:
        """Start without programs."""
        self._programs: dict[Shapes, Program] = {}
        self._lock = free_in_child(threading.Lock())

    def get(self, shapes: Shapes, compile_for: Callable[[Shapes], Program]) -> Program:
        """Return the program for shapes of the inputs.

        Args:
            shapes: The shapes.
            compile_for: Compiles the program when the shapes are first run.
        """
        with self._lock:
            found = self._programs.pop(shapes, None)
            if found is None:
                found = compile_for(shapes)
            while len(self._programs) >= _MAX_SHAPES:
                del self._programs[next(iter(self._programs))]  # the one that was not used longest
            self._programs[shapes] = found
            return found


@attrs.frozen
class NodeForm:
    """A node that is translated to the terms of a library.

    Attributes:
        attributes: Its attributes; text as str.
        version: Opset version of the model.
    """

    attributes: Mapping[str, Any]
    version: int

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute, or ``default``."""
        return self.attributes.get(name, default)

    def only(self, name: str, default: Any) -> None:
        """Require that an attribute has its default.

        Raises:
            NotImplementedError: It has another value.
        """
        found = self.get(name, default)
        if found != default:
            raise NotImplementedError(f"{name}={found!r} is not translated")


def refusal_of_operator(node: Node, operators: Container[str], title: str) -> str:
    """Return why an operator is not translated; "" if it is.

    Args:
        node: The node.
        operators: The operators that are translated, in their present forms.
        title: Name of the library.
    """
    if node.op_type not in operators or node.domain:
        return f"{node.op_type} is not translated to {title}"
    if node.attrs.get("broadcast", 0) or (node.op_type == "Reshape" and "shape" in node.attrs):
        return f"{node.op_type} of version {node.version} is not translated to {title}"
    return ""


def refusal_of_operands(node: Node, operators: Container[str], title: str) -> str:
    """Return why a node is not translated; "" if its operator and operands are fit for it.

    Args:
        node: The node.
        operators: The operators that are translated.
        title: Name of the library.
    """
    if reason := refusal_of_operator(node, operators, title):
        return reason
    for k, value in enumerate(node.sources):
        type_ = value.type
        real = isinstance(type_, TensorType) and type_.dtype == "float32"
        if not real and (k == 0 or value.parameter is None):
            return f"{value.name!r} is {type_}; {title} is used for float32"
    return ""


def result_array(target: Array | None, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    """Return the caller's array for a result, or a new one if that does not fit.

    Args:
        target: The caller's array; None: there is none.
        shape: Shape of the result.
        dtype: Its NumPy dtype.
    """
    fits = target is not None and target.shape == shape and target.dtype == dtype
    return target if fits and target is not None else np.empty(shape, dtype)


def parsed_model(model: bytes) -> tuple[Any, int, dict[str, Array]]:
    """Return a model for a child that translates nodes itself.

    Args:
        model: A serialized ONNX model of `compile_library_model`.

    Returns:
        The ``onnx.GraphProto``, the opset version of the standard's operators, and the weights by
        name, which are copies.
    """
    import onnx
    from onnx import numpy_helper

    proto = onnx.load_from_string(model)
    version = next(opset.version for opset in proto.opset_import if not opset.domain)
    weights = {t.name: numpy_helper.to_array(t).copy() for t in proto.graph.initializer}
    return proto.graph, version, weights


def node_attributes(node: Any) -> dict[str, Any]:
    """Return the attributes of an ``onnx.NodeProto`` by name; text as str."""
    from onnx import helper

    found = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return {name: v.decode() if isinstance(v, bytes) else v for name, v in found.items()}


# The process that ran a library with OpenMP first; 0: none yet.
_openmp_process = 0


def openmp_threads(wanted: int) -> int:
    """Return how many threads of OpenMP a run of a library may use; 0: as many as it chooses.

    In a forked child GNU's OpenMP waits without end for threads that only the parent has, unless it
    uses the calling thread alone.

    Args:
        wanted: The number that the options say; 0: the library chooses.
    """
    global _openmp_process
    process = os.getpid()
    _openmp_process = _openmp_process or process
    alone = process != _openmp_process or parent_had_threads_beside()
    return 1 if alone else wanted


def writable_view(array: Array) -> Array:
    """Return a writable array over the same memory, for libraries that take no read-only arrays.

    They only read their inputs. The caller holds ``array`` during the run.
    """
    if array.flags.writeable:
        return array
    memory = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
    return np.ndarray(array.shape, array.dtype, memoryview(memory))

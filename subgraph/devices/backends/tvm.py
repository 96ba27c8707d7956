"""TVM: regions compiled by Apache TVM for the processor, weights as arguments of the function."""

from __future__ import annotations

import importlib
import io
import threading
import warnings
from contextlib import redirect_stdout
from typing import Any

import attrs

from subgraph.devices.backends.base import Backend, BackendOptions, LibraryModel
from subgraph.devices.backends.libraries.tvm_model import TvmModel, constant_outputs
from subgraph.graph.graph import Node
from subgraph.runtime.settings import option
from subgraph.system.forking import free_in_child

# Operators whose conversion was tested on random graphs. The frontend aborts the process for some
# models with other operators, so no others are passed to it.
_OPERATORS = frozenset(
    {
        *("Abs", "Add", "AveragePool", "BatchNormalization", "Clip", "Concat", "Conv", "Div"),
        *("Erf", "Exp", "Flatten", "Gemm", "GlobalAveragePool", "Identity", "LayerNormalization"),
        *("MatMul", "MaxPool", "Mul", "Neg", "ReduceMean", "Relu", "Reshape", "Sigmoid", "Softmax"),
        *("Sqrt", "Squeeze", "Sub", "Tanh", "Transpose", "Unsqueeze"),
    }
)
# TVM converts and builds in one thread at a time (scopes of its operators are global), and so is
# the redirection of standard output.
_converting = free_in_child(threading.RLock())


@attrs.frozen
class TvmOptions(BackendOptions):
    """Options of TVM."""

    WEIGHTS: str = option(
        "inputs",
        "'inputs' passes weights at every run; 'inside' compiles them into the function, which is "
        "compiled again for new values",
        values=("inputs", "inside"),
    )
    TARGET: str = option("llvm", "target of TVM, such as 'llvm -mcpu=x86-64-v3'")


class TvmDevice(Backend):
    """Runs regions by functions that TVM builds."""

    options_class = TvmOptions
    module = "tvm"
    requirement = "apache-tvm >= 0.27"
    title = "TVM"
    empty_tensors = False
    writes_outputs = False
    keeps_nan = False  # Relu of NaN is 0, for one
    dtypes = frozenset(("float32", "float64", "int32", "int64", "bool"))

    def start(self) -> None:
        """Import TVM, its relax language and its frontend for ONNX."""
        super().start()
        self._relax: Any = importlib.import_module("tvm.relax")
        self._frontend: Any = importlib.import_module("tvm.relax.frontend.onnx")

    def refusal(self, node: Node) -> str:
        """Refuse operators that the frontend for ONNX is not known to convert."""
        if node.op_type not in _OPERATORS or node.domain:
            return f"{node.op_type} is not left to TVM's frontend for ONNX"
        dtype = getattr(node.outputs[0].type, "dtype", "")
        if node.op_type in ("Gemm", "ReduceMean") and not dtype.startswith("float"):
            return f"TVM computes {node.op_type} of {dtype} otherwise than ONNX"
        if len(node.outputs) > 1 or node.attrs.get("auto_pad", "NOTSET") != "NOTSET":
            return f"TVM's frontend converts this form of {node.op_type} otherwise than ONNX"
        return ""

    def try_library_model(self, model: bytes, options: Any) -> None:
        """Convert and lower a model without building it, because a build takes much longer."""
        lowered = self._relax.transform.LegalizeOps()(self._converted(model))

        def visit(expression: Any) -> None:
            op: Any = getattr(expression, "op", None)
            if isinstance(op, self.library.ir.Op) and op.get_attr("FLegalize") is not None:
                raise ValueError(f"TVM cannot lower {op.name} for tensors of these types")

        for function in lowered.functions.values():
            if isinstance(function, self._relax.Function):
                self._relax.analysis.post_order_visit(function, visit)

    def _converted(self, model: bytes) -> Any:
        import onnx

        proto = onnx.load_from_string(model)
        # The frontend prints its errors, which come as exceptions too.
        with _converting, warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            return self._frontend.from_onnx(proto, keep_params_in_input=False)

    def compile_library_model(self, model: bytes, options: Any) -> LibraryModel:
        """Return the built function."""
        library: Any = self.library
        with _converting:
            target = library.target.Target(options.TARGET)
            built = self._relax.build(self._converted(model), target)
        return TvmModel(
            built, library, self._relax, options.INFERENCE_NUM_THREADS, constant_outputs(model)
        )

"""Engines of TensorRT: parsed networks, builds for ranges of shapes, refit, and runs."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import attrs

from subgraph.devices.backends.libraries.cuda import Card, Stream
from subgraph.devices.backends.libraries.translation import Shapes, result_array
from subgraph.graph.types import Array

# Engines for exact shapes that a model holds, and engines with replaceable weights that are held
# for later values (estimates). Each occupies memory of the card; building one takes seconds.
_MAX_ENGINES = 16
_MAX_REFITTABLE = 8
# Operands whose values TensorRT's parser passes on unchanged, so that a refit replaces them.
_REFITTABLE = {
    "Add": (0, 1),
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "Gemm": (1, 2),
    "MatMul": (0, 1),
    "Mul": (0, 1),
    "Sub": (0, 1),
}
# NVIDIA's release notes: refittable engines of this version may treat the bias of a product as 0.
_WRONG_REFIT = "11.3."


class Builder:
    """The process-wide state of TensorRT: its log, its builder and engines for refits.

    Attributes:
        library: The module of TensorRT.
        log: Its logger.
        errors: The last errors that it has logged.
        refittable: Built engines and the digests of their weights, by network and shapes.
    """

    def __init__(self, library: Any) -> None:
        """Create the builder."""
        self.library = library
        self.errors: deque[str] = deque(maxlen=4)
        self.log = _logger(library, self.errors)
        self.refittable: dict[bytes, tuple[bytes, dict[str, bytes]]] = {}
        self._lock = threading.Lock()  # one build at a time: the library has one log

    def parsed(self, model: bytes) -> tuple[Any, list[str], list[str]]:
        """Return a network, whose parser holds its weights, and the names of its ports.

        Args:
            model: A serialized ONNX model.

        Returns:
            (builder, network and parser), names of the inputs, names of the outputs.

        Raises:
            ValueError: the library refuses the model, or reads an input as a shape.
        """
        library = self.library
        with self._lock:
            self.errors.clear()
            builder = library.Builder(self.log)
            strong = library.NetworkDefinitionCreationFlag.STRONGLY_TYPED
            network = builder.create_network(1 << int(strong))
            parser = library.OnnxParser(network, self.log)
            if not parser.parse(model):
                found = [parser.get_error(k) for k in range(parser.num_errors)]
                texts = [f"{e.node_operator()}: {e.code()}: {e.desc()}" for e in found]
                raise ValueError("; ".join(texts) or self.reason("it does not parse the model"))
        inputs = [network.get_input(k) for k in range(network.num_inputs)]
        for port in inputs:
            if port.is_shape_tensor:
                raise ValueError(f"the values of {port.name} decide shapes, and are not constant")
        outputs = [network.get_output(k).name for k in range(network.num_outputs)]
        return (builder, network, parser), [port.name for port in inputs], outputs

    def plan(self, model: bytes, options: Any, shapes: tuple[Shapes, Shapes, Shapes]) -> bytes:
        """Return a built engine in its serialized form.

        Args:
            model: A serialized ONNX model.
            options: The device's options.
            shapes: The smallest shapes of the inputs, those to optimize for, and the largest ones.

        Raises:
            RuntimeError: the library cannot build it.
        """
        flags = self.library.BuilderFlag
        (builder, network, _parser), _, _ = self.parsed(model)
        with self._lock:
            self.errors.clear()
            config = builder.create_builder_config()
            if options.PRECISION == "f32":
                config.clear_flag(flags.TF32)
            if self.refits_weights(options):
                config.set_flag(flags.REFIT)
            profile = builder.create_optimization_profile()
            for k, (low, best, high) in enumerate(zip(*shapes, strict=True)):
                port = network.get_input(k)
                if -1 in tuple(port.shape):
                    profile.set_shape(port.name, low, best, high)
            config.add_optimization_profile(profile)
            built = builder.build_serialized_network(network, config)
            if built is None:
                raise RuntimeError(self.reason("it builds no engine"))
            return bytes(built)

    def loaded(self, plan: bytes) -> Any:
        """Return the engine of its serialized form.

        Raises:
            RuntimeError: the library does not take it.
        """
        self.errors.clear()
        engine = self.library.Runtime(self.log).deserialize_cuda_engine(plan)
        if engine is None:
            raise RuntimeError(self.reason("it does not load the engine"))
        return engine

    def refits_weights(self, options: Any) -> bool:
        """Return whether engines are built so that their weights can be replaced."""
        wrong = str(self.library.__version__).startswith(_WRONG_REFIT)
        return options.WEIGHTS == "refit" and not wrong

    def refitted(self, model: bytes, key: bytes, weights: dict[str, bytes]) -> Any:
        """Return an engine that was built for other weights, with those of a model.

        The engine is a new one: runs in progress use the older one with its own weights.

        Args:
            model: A serialized ONNX model.
            key: Key of the network and its shapes.
            weights: Digests of the weights by name.

        Returns:
            The engine; None if there is none, or the library cannot replace all that is new.
        """
        plan, older = self.refittable.get(key, (b"", {}))
        if not plan:
            return None
        engine = self.loaded(plan)
        refitter = self.library.Refitter(engine, self.log)
        new = {name for name, digest in weights.items() if older.get(name) != digest}
        if not new <= set(refitter.get_all_weights()):  # some were folded into others
            return None
        if not self.library.OnnxParserRefitter(refitter, self.log).refit_from_bytes(model):
            return None
        if refitter.get_missing_weights() or not refitter.refit_cuda_engine():
            return None
        return engine

    def reason(self, otherwise: str) -> str:
        """Return the errors that the library has logged; ``otherwise`` if there are none."""
        return "; ".join(self.errors) or otherwise


@attrs.frozen(eq=False)
class _Engine:
    """An engine and the shapes of inputs that it runs, from the smallest to the largest."""

    engine: Any
    low: Shapes
    high: Shapes

    def fits(self, shapes: Shapes) -> bool:
        """Return whether it runs inputs of these shapes."""
        ports = zip(self.low, shapes, self.high, strict=True)
        return all(
            a <= size <= b
            for low, shape, high in ports
            for a, size, b in zip(low, shape, high, strict=True)
        )


class EngineModel:
    """A parsed model with engines for ranges of shapes; several requests use it together.

    Attributes:
        stored: Smallest and largest shapes of engines of an imported model, and the engines in
            their serialized form, which are loaded at the first run.
    """

    def __init__(self, builder: Builder, card: Card | None, model: bytes, options: Any) -> None:
        """Parse the model."""
        network, self.inputs, self.outputs = builder.parsed(model)
        ports = [network[1].get_input(k) for k in range(len(self.inputs))]
        self._sizes: Shapes = tuple(tuple(port.shape) for port in ports)
        self.builder = builder
        self.card = card
        self.stored: list[tuple[Shapes, Shapes, bytes]] = []
        self._model = model
        self._options = options
        self._engines: list[_Engine] = []
        self._lock = threading.Lock()

    def plans(self) -> list[tuple[Shapes, Shapes, bytes]]:
        """Return smallest and largest shapes, and serialized form, of each engine for an export.

        An engine of a model whose sizes are all known is built for this, if there is none yet.
        """
        with self._lock:
            found = [(e.low, e.high, bytes(e.engine.serialize())) for e in self._engines]
            fixed = all(size >= 0 for shape in self._sizes for size in shape)
            if not (found or self.stored) and fixed:
                only = self._sizes
                plan = self.builder.plan(self._model, self._options, (only, only, only))
                self.stored.append((only, only, plan))
            return found + self.stored

    def engine(self, shapes: Shapes) -> Any:
        """Return an engine that runs inputs of these shapes; it is built if there is none."""
        with self._lock:
            while self.stored:
                low, high, plan = self.stored.pop()
                with suppress(RuntimeError):  # of another card or version: built again if needed
                    self._engines.append(_Engine(self.builder.loaded(plan), low, high))
            for each in self._engines:
                if each.fits(shapes):
                    return each.engine
            low, high = self._range(shapes)
            made = _Engine(self._built(low, shapes, high), low, high)
            exact = self._options.SHAPES == "exact"
            older = self._engines[1 - _MAX_ENGINES :] if exact else []
            self._engines = [*older, made]
            return made.engine

    def _range(self, shapes: Shapes) -> tuple[Shapes, Shapes]:
        """Return the smallest and largest shapes of an engine for new shapes."""
        if self._options.SHAPES == "exact" or not self._engines:
            return shapes, shapes
        last = self._engines[-1]
        return _each(min, last.low, shapes), _each(max, last.high, shapes)

    def _built(self, low: Shapes, best: Shapes, high: Shapes) -> Any:
        builder, model = self.builder, self._model
        if not builder.refits_weights(self._options):
            return builder.loaded(builder.plan(model, self._options, (low, best, high)))
        network, weights = network_and_weights(model)
        key = hashlib.sha256(repr((self._options, low, high)).encode() + network).digest()
        engine = builder.refitted(model, key, weights)
        if engine is None:
            plan = builder.plan(model, self._options, (low, best, high))
            engine = builder.loaded(plan)
            while len(builder.refittable) >= _MAX_REFITTABLE:
                del builder.refittable[next(iter(builder.refittable))]
            builder.refittable[key] = plan, weights
        return engine

    def runner(self) -> Callable[[Sequence[Array], Sequence[Array | None]], Sequence[Array]]:
        """Return a function that runs the model, with a stream and memory of its own."""
        return _Run(self)


class _Run:
    """One request's execution context, stream and memory."""

    def __init__(self, model: EngineModel) -> None:
        assert model.card is not None, "TENSORRT starts only with a card"
        self._model = model
        self._card = model.card
        self._stream = Stream(self._card)
        self._memory = {name: self._stream.memory() for name in (*model.inputs, *model.outputs)}
        self._shapes: Shapes | None = None
        self._engine: Any = None

    def __call__(self, arrays: Sequence[Array], into: Sequence[Array | None]) -> Sequence[Array]:
        self._card.use()
        shapes = tuple(array.shape for array in arrays)
        if shapes != self._shapes:
            self._set_shapes(shapes)
        context, stream, model = self._context, self._stream, self._model
        for name, array in zip(model.inputs, arrays, strict=True):
            if name in self._ports:
                address = self._memory[name].reserve(array.nbytes)
                stream.upload(array, address)
                context.set_tensor_address(name, address)
        results: list[Array] = []
        for (name, shape, dtype), target in zip(self._results, into, strict=True):
            array = result_array(target, shape, dtype)
            context.set_tensor_address(name, self._memory[name].reserve(array.nbytes))
            results.append(array)
        if not context.execute_async_v3(stream.handle):
            raise RuntimeError(model.builder.reason("the run has failed"))
        for name, array in zip(model.outputs, results, strict=True):
            stream.download(array, self._memory[name].reserve(array.nbytes))
        stream.wait()
        return results

    def _set_shapes(self, shapes: Shapes) -> None:
        """Prepare a run of other shapes: the context, and shapes and dtypes of the results."""
        self._shapes = None
        model, library = self._model, self._model.builder.library
        engine = model.engine(shapes)
        if engine is not self._engine:
            self._context: Any = engine.create_execution_context()
            if self._context is None:
                raise RuntimeError(model.builder.reason("it makes no execution context"))
            self._engine = engine
            self._ports = {engine.get_tensor_name(k) for k in range(engine.num_io_tensors)}
        for name, shape in zip(model.inputs, shapes, strict=True):
            if name in self._ports and not self._context.set_input_shape(name, shape):
                raise RuntimeError(model.builder.reason(f"it refuses shape {shape} of {name}"))
        self._results: list[tuple[str, tuple[int, ...], Any]] = []
        for name in model.outputs:
            found = tuple(self._context.get_tensor_shape(name))
            if -1 in found:
                raise RuntimeError(f"the sizes of {name} depend on values: {found}")
            self._results.append((name, found, library.nptype(engine.get_tensor_dtype(name))))
        self._shapes = shapes


def network_and_weights(model: bytes) -> tuple[bytes, dict[str, bytes]]:
    """Return a model without the values that a refit can replace, and digests of these values.

    Args:
        model: A serialized ONNX model.

    Returns:
        The serialized model, and the digests by the weights' names.
    """
    import onnx

    proto = onnx.load_from_string(model)
    fixed = {port.name for port in proto.graph.output}
    for node in proto.graph.node:
        places = _REFITTABLE.get(node.op_type, ())
        fixed.update(name for k, name in enumerate(node.input) if k not in places or node.domain)
    digests: dict[str, bytes] = {}
    for tensor in proto.graph.initializer:
        if tensor.name not in fixed and tensor.data_type == onnx.TensorProto.FLOAT:
            digests[tensor.name] = hashlib.sha256(tensor.SerializeToString()).digest()
            tensor.ClearField("raw_data")
            tensor.ClearField("float_data")
    network: bytes = proto.SerializeToString(deterministic=True)
    return network, digests


def _logger(library: Any, errors: deque[str]) -> Any:
    """Return a logger of the library that collects errors."""

    def init(self: Any) -> None:
        library.ILogger.__init__(self)

    def log(self: Any, severity: Any, text: str) -> None:
        if severity in (library.ILogger.ERROR, library.ILogger.INTERNAL_ERROR):
            errors.append(text)

    return type("Log", (library.ILogger,), {"__init__": init, "log": log})()


def _each(function: Callable[[int, int], int], first: Shapes, second: Shapes) -> Shapes:
    """Return the function of each pair of sizes."""
    pairs = zip(first, second, strict=True)
    return tuple(tuple(map(function, a, b)) for a, b in pairs)

"""ONNX nodes in terms of cuDNN: operands, layouts, and the operations that compute a node.

cuDNN plans small graphs, such as a convolution with a bias and Relu; each `Part` becomes one graph.
All tensors have ONNX's order of axes and are contiguous, for which cuDNN has plans that compute
float32 with all its bits. Products with weights are convolutions by filters of one element, since
its plans of general products of float32 drop bits.

What cuDNN 9.19 computes wrongly on an H100, without an error, is refused or expressed otherwise:
operands that broadcast along the first axis of three, transposes, and small results of Softplus.
Its quotients are not rounded correctly. Its kernels of single elements fail to start for rows of
some 800,000 elements.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from subgraph.devices.backends.libraries.translation import NodeForm, node_attributes
from subgraph.graph.types import Array

Shape = tuple[int, ...]
# Elements along the last axis of a pointwise operation (estimate). Rows of 800,000 elements did not
# start (measured on an H100 with cuDNN 9.19).
_MAX_ROW = 1 << 16


@attrs.frozen(eq=False)
class Operand:
    """A tensor that a graph reads.

    Attributes:
        source: Position of the node's input, or an array that was computed from weights.
        dims: Sizes, as cuDNN gets them.
    """

    source: int | Array
    dims: Shape


@attrs.frozen(eq=False)
class Part:
    """The computation of one node.

    Attributes:
        shape: Shape of the output.
        dims: Sizes of the output, as cuDNN gets them.
        operands: What is read.
        compute: Adds operations to a graph, from the operands' tensors; returns the output's
            tensor. None if the output has the elements of the first operand.
        product: Whether it is a product, for which cuDNN has plans that drop bits.
        relu: Whether cuDNN has plans with Relu behind it.
    """

    shape: Shape
    dims: Shape = ()
    operands: tuple[Operand, ...] = ()
    compute: Callable[..., Any] | None = None
    product: bool = False
    relu: bool = False


@attrs.frozen
class Form(NodeForm):
    """A node to translate.

    Attributes:
        shapes: Shapes of its inputs; None for one that is left out.
        weights: Values of the inputs that are weights, by position.
    """

    shapes: list[Shape | None]
    weights: dict[int, Array]

    def shape(self, position: int) -> Shape:
        """Return the shape of an input that is not left out."""
        found = self.shapes[position]
        assert found is not None, "the input is required"
        return found

    def has(self, position: int) -> bool:
        """Return whether an input is there."""
        return position < len(self.shapes) and self.shapes[position] is not None

    def weight(self, position: int) -> Array:
        """Return the value of an input that has to be a weight."""
        if position not in self.weights:
            raise NotImplementedError(f"input {position} is no weight")
        return self.weights[position]

    def integers(self, name: str, position: int) -> list[int] | None:
        """Return integers that are an attribute or a weight, by version; None if there are none."""
        if self.has(position):
            return [int(n) for n in self.weight(position).reshape(-1)]
        found = self.get(name)
        return None if found is None else list(found)


def strides_of(dims: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor, in elements."""
    return [math.prod(dims[k + 1 :]) for k in range(len(dims))]


def _spatial(form: Form, name: str, rank: int, default: int) -> list[int]:
    """Return an attribute with a number for each spatial axis; an image of one axis gets two."""
    found = list(form.get(name) or [default] * rank)
    return [default] * (2 - rank) + found


def _windows(form: Form, rank: int) -> dict[str, list[int]]:
    """Return cuDNN's arguments for the windows of a convolution over ``rank`` spatial axes."""
    form.only("auto_pad", "NOTSET")
    pads = list(form.get("pads") or [0] * (2 * rank))
    missing = [0] * (2 - rank)
    return {
        "pre_padding": missing + pads[:rank],
        "post_padding": missing + pads[rank:],
        "stride": _spatial(form, "strides", rank, 1),
        "dilation": _spatial(form, "dilations", rank, 1),
    }


def _image(shape: Shape) -> Shape:
    """Return the sizes of an image, which has at least two spatial axes."""
    return (*shape[:2], *[1] * (4 - len(shape)), *shape[2:])


def _bias(form: Form, channels: int, rank: int) -> Operand:
    """Return the bias of a convolution, zeros if it has none."""
    dims = (1, channels, *[1] * (rank - 2))
    return Operand(2 if form.has(2) else np.zeros(channels, np.float32), dims)


def _with_bias(windows: dict[str, list[int]]) -> Callable[..., Any]:
    """Return a function that adds a convolution and the sum with its bias to a graph."""

    def compute(graph: Any, x: Any, w: Any, bias: Any) -> Any:
        return graph.add(graph.conv_fprop(x, w, **windows), bias)

    return compute


def _conv(form: Form) -> Part:
    x, w = _image(form.shape(0)), _image(form.shape(1))
    rank = len(form.shape(0)) - 2
    windows = _windows(form, rank)
    rows = zip(x[2:], w[2:], *windows.values(), strict=True)
    sizes = [(size + a + b - d * (k - 1) - 1) // s + 1 for size, k, a, b, s, d in rows]
    dims = (x[0], w[0], *sizes)
    operands = (Operand(0, x), Operand(1, w), _bias(form, w[0], len(dims)))
    shape = (*dims[:2], *dims[len(dims) - rank :])
    return Part(shape, dims, operands, _with_bias(windows), product=True, relu=True)


def _conv_transpose(form: Form) -> Part:
    """Return the gradient of a convolution by its image, which is a transposed convolution."""
    form.only("output_shape", None)
    if form.has(2):
        raise NotImplementedError("a bias is not translated")
    x, w = _image(form.shape(0)), _image(form.shape(1))
    rank = len(form.shape(0)) - 2
    windows, extra = _windows(form, rank), _spatial(form, "output_padding", rank, 0)
    rows = zip(x[2:], w[2:], *windows.values(), extra, strict=True)
    sizes = [s * (size - 1) + e + d * (k - 1) + 1 - a - b for size, k, a, b, s, d, e in rows]
    dims = (x[0], w[1] * int(form.get("group", 1)), *sizes)

    def compute(graph: Any, x: Any, w: Any) -> Any:
        return graph.conv_dgrad(x, w, **windows)

    shape = (*dims[:2], *dims[len(dims) - rank :])
    return Part(shape, dims, (Operand(0, x), Operand(1, w)), compute, product=True)


def _product(form: Form) -> Part:
    """Return the product with a weight, as a convolution of images of one element."""
    for name, default in (("transA", 0), ("alpha", 1.0), ("beta", 1.0)):
        form.only(name, default)
    x, matrix = form.shape(0), form.weight(1)
    if matrix.ndim != 2 or len(x) < 2:
        raise NotImplementedError(f"products of {len(x)} and {matrix.ndim} axes are not translated")
    filters = np.ascontiguousarray(matrix if form.get("transB") else matrix.T)
    width, depth = filters.shape
    rows = math.prod(x[:-1])
    bias = _bias(form, width, 4)
    if form.has(2):
        bias = Operand(2, bias.dims) if math.prod(form.shape(2)) == width else bias
        if math.prod(form.shape(2)) != width or len(form.shape(2)) > 1:
            raise NotImplementedError(f"a bias of shape {form.shape(2)} is not translated")

    none, one = [0, 0], [1, 1]
    windows = {"pre_padding": none, "post_padding": none, "stride": one, "dilation": one}
    operands = (Operand(0, (rows, depth, 1, 1)), Operand(filters, (width, depth, 1, 1)), bias)
    return Part(
        (*x[:-1], width),
        (rows, width, 1, 1),
        operands,
        _with_bias(windows),
        product=True,
        relu=True,
    )


def _column(size: int) -> Shape:
    """Return the sizes of a tensor of a pointwise operation without rows.

    cuDNN's plans are for three axes, and for any number of elements only along the second one.
    """
    return 1, size, 1


def _rows(sizes: Sequence[int]) -> Shape:
    """Return the sizes of a tensor of a pointwise operation over up to two axes.

    Raises:
        NotImplementedError: There are more axes, or the rows are too long.
    """
    if len(sizes) < 2:
        return _column(math.prod(sizes))
    if len(sizes) > 2 or sizes[1] > _MAX_ROW:
        raise NotImplementedError(f"broadcasting over {' x '.join(map(str, sizes))} elements")
    return 1, sizes[0], sizes[1]


def _unary(name: str, attribute: str = "", default: float = 0.0, argument: str = "") -> Any:
    """Return the translation of a function of single elements.

    Args:
        name: Name of cuDNN's function.
        attribute: ONNX's attribute that it has; "" for none.
        default: Default of the attribute.
        argument: Argument of cuDNN's function for the attribute; "" if it takes the default alone.
    """

    def translated(form: Form) -> Part:
        options: dict[str, Any] = {}
        if argument:
            options[argument] = float(form.get(attribute, default))
        elif attribute:
            form.only(attribute, default)
        dims = _column(math.prod(form.shape(0)))

        def compute(graph: Any, x: Any) -> Any:
            return getattr(graph, name)(x, **options)

        return Part(form.shape(0), dims, (Operand(0, dims),), compute)

    return translated


def _gelu(form: Form) -> Part:
    tanh = form.get("approximate", "none") == "tanh"
    part: Part = _unary("gelu_approx_tanh" if tanh else "gelu")(form)
    return part


def _binary(name: str) -> Callable[[Form], Part]:
    """Return the translation of a function of pairs of elements, with broadcasting."""

    def translated(form: Form) -> Part:
        if len(form.shapes) != 2:
            raise NotImplementedError(f"{len(form.shapes)} inputs are not translated")
        shape = np.broadcast_shapes(form.shape(0), form.shape(1))
        sizes = _merged(form.shape(0), form.shape(1))
        dims = _rows([max(pair) for pair in sizes])
        operands = tuple(Operand(k, _rows([pair[k] for pair in sizes])) for k in range(2))

        def compute(graph: Any, a: Any, b: Any) -> Any:
            return getattr(graph, name)(a, b)

        return Part(shape, dims, operands, compute)

    return translated


def _merged(first: Shape, second: Shape) -> list[tuple[int, int]]:
    """Return the sizes of two operands, with neighbouring axes of the same broadcast as one."""
    rank = max(len(first), len(second))
    sizes: list[tuple[int, int]] = []
    for pair in zip(
        (1,) * (rank - len(first)) + first, (1,) * (rank - len(second)) + second, strict=True
    ):
        last = sizes[-1] if sizes else (0, 0)
        if pair == (1, 1):
            continue
        if (
            sizes
            and (last[0] == last[1]) == (pair[0] == pair[1])
            and ((last[0] == 1) == (pair[0] == 1) and (last[1] == 1) == (pair[1] == 1))
        ):
            sizes[-1] = (last[0] * pair[0], last[1] * pair[1])
        else:
            sizes.append(pair)
    return sizes


def _clip(form: Form) -> Part:
    dims, one = _column(math.prod(form.shape(0))), _column(1)
    operands, names = [Operand(0, dims)], list[str]()
    for k, (attribute, name) in enumerate((("min", "max"), ("max", "min")), 1):
        if form.has(k):
            operands.append(Operand(k, one))
        elif attribute in form.attributes:
            operands.append(Operand(np.array(form.attributes[attribute], np.float32), one))
        else:
            continue
        names.append(name)

    def compute(graph: Any, x: Any, *bounds: Any) -> Any:
        for name, bound in zip(names, bounds, strict=True):
            x = getattr(graph, name)(x, bound)
        return x

    return Part(form.shape(0), dims, tuple(operands), compute if names else None)


def _batch_normalization(form: Form) -> Part:
    form.only("training_mode", 0)
    x = form.shape(0)
    scale, bias, mean, variance = (form.weight(k).astype(np.float64) for k in range(1, 5))
    factor = scale / np.sqrt(variance + form.get("epsilon", 1e-5))
    terms = [np.tile(term.astype(np.float32), x[0]) for term in (factor, bias - mean * factor)]
    dims, channels = _rows([x[0] * x[1], math.prod(x[2:])]), _column(x[0] * x[1])

    def compute(graph: Any, x: Any, factor: Any, term: Any) -> Any:
        return graph.add(graph.mul(x, factor), term)

    operands = (Operand(0, dims), *[Operand(term, channels) for term in terms])
    return Part(x, dims, operands, compute)


def _layer_normalization(form: Form) -> Part:
    form.only("stash_type", 1)
    x, axis = form.shape(0), int(form.get("axis", -1)) % len(form.shape(0))
    width = math.prod(x[axis:])
    terms = [Operand(1, (1, width, 1, 1)), _bias(form, width, 4)]
    if any(math.prod(form.shape(k)) != width for k in (1, 2) if form.has(k)):
        raise NotImplementedError("the scale or bias has another shape")
    return _normalized(form, "layernorm", (math.prod(x[:axis]), width, 1, 1), terms)


def _instance_normalization(form: Form) -> Part:
    x = form.shape(0)
    terms = [Operand(k, (1, x[1], 1, 1)) for k in (1, 2)]
    return _normalized(form, "instancenorm", (*x[:2], math.prod(x[2:]), 1), terms)


def _normalized(form: Form, name: str, dims: Shape, terms: Sequence[Operand]) -> Part:
    """Return a normalization by mean and variance, then a scale and a bias.

    Args:
        form: The node.
        name: Name of cuDNN's function.
        dims: Sizes of the image that is normalized.
        terms: The scale and the bias.
    """
    epsilon = float(form.get("epsilon", 1e-5))

    def compute(graph: Any, x: Any, scale: Any, bias: Any) -> Any:
        library: Any = importlib.import_module("cudnn")
        return getattr(graph, name)(
            norm_forward_phase=library.norm_forward_phase.INFERENCE,
            input=x,
            scale=scale,
            bias=bias,
            epsilon=graph.tensor_scalar(epsilon, library.scalar_type.COMPILE_TIME_CONST),
        )[0]

    return Part(form.shape(0), dims, (Operand(0, dims), *terms), compute)


def _reshape(form: Form) -> Part:
    x, wanted = form.shape(0), form.integers("shape", 1) or []
    form.only("allowzero", 0)
    sizes = [x[k] if size == 0 else size for k, size in enumerate(wanted)]
    rest = math.prod(size for size in sizes if size > 0)
    return Part(tuple(math.prod(x) // rest if size < 0 else size for size in sizes))


def _flatten(form: Form) -> Part:
    x, axis = form.shape(0), int(form.get("axis", 1))
    axis = axis + len(x) if axis < 0 else axis
    return Part((math.prod(x[:axis]), math.prod(x[axis:])))


def _squeeze(form: Form) -> Part:
    x, axes = form.shape(0), form.integers("axes", 1)
    if axes is None:
        return Part(tuple(size for size in x if size != 1))
    removed = {axis % len(x) for axis in axes}
    return Part(tuple(size for k, size in enumerate(x) if k not in removed))


def _unsqueeze(form: Form) -> Part:
    axes = form.integers("axes", 1) or []
    rank = len(form.shape(0)) + len(axes)
    added, sizes = {axis % rank for axis in axes}, iter(form.shape(0))
    return Part(tuple(1 if k in added else next(sizes) for k in range(rank)))


OPERATORS: dict[str, Callable[[Form], Part]] = {
    **{op: _binary(op.lower()) for op in ("Add", "Max", "Min", "Mul", "Pow", "Sub")},
    **{op: _unary(op.lower()) for op in ("Abs", "Ceil", "Cos", "Erf", "Exp", "Floor", "Log")},
    **{
        op: _unary(op.lower())
        for op in ("Neg", "Reciprocal", "Relu", "Sigmoid", "Sin", "Sqrt", "Tan", "Tanh")
    },
    "BatchNormalization": _batch_normalization,
    "Clip": _clip,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Elu": _unary("elu", "alpha", 1.0),
    "Flatten": _flatten,
    "Gelu": _gelu,
    "Gemm": _product,
    "Identity": lambda form: Part(form.shape(0)),
    "InstanceNormalization": _instance_normalization,
    "LayerNormalization": _layer_normalization,
    "LeakyRelu": _unary("leaky_relu", "alpha", 0.01, "negative_slope"),
    "MatMul": _product,
    "Reshape": _reshape,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
}


@attrs.frozen(eq=False)
class Step:
    """A part of a model for certain sizes.

    Attributes:
        part: The computation.
        inputs: Names of the node's inputs.
        output: Name of the output.
        kind: The operators and their attributes.
    """

    part: Part
    inputs: tuple[str, ...]
    output: str
    kind: str

    def key(self) -> tuple[Any, ...]:
        """Return a key that is equal for parts with equal graphs."""
        operands = [
            (o.source if isinstance(o.source, int) else -1, o.dims) for o in self.part.operands
        ]
        return self.kind, self.part.dims, tuple(operands)


def steps_of(
    body: Any, version: int, weights: dict[str, Array], shapes: dict[str, Shape]
) -> Iterator[Step]:
    """Yield the steps of a model, with Relu as part of the convolution before it.

    Args:
        body: The ``onnx.GraphProto``, with nodes in the order of computation.
        version: Opset version of the standard's operators.
        weights: Its weights by name.
        shapes: Shapes of the inputs by name, to which those of all values are added.

    Raises:
        NotImplementedError: a node has a form that is not translated.
    """
    shapes.update({name: array.shape for name, array in weights.items()})
    uses = [name for node in body.node for name in node.input]
    uses += [port.name for port in body.output]
    waiting: Step | None = None
    for node in body.node:
        found = [shapes[name] if name else None for name in node.input]
        values = {k: weights[name] for k, name in enumerate(node.input) if name in weights}
        form = Form(node_attributes(node), version, found, values)
        try:
            part = OPERATORS[node.op_type](form)
            if len([name for name in node.output if name]) > 1:
                raise NotImplementedError("more than one output")
            if part.compute is None and 0 in values:
                raise NotImplementedError("a weight gets another shape")
        except NotImplementedError as error:
            raise NotImplementedError(f"{node.op_type}: {error}") from error
        kind = f"{node.op_type} {sorted(form.attributes.items())}"
        step = Step(part, tuple(node.input), node.output[0], kind)
        shapes[step.output] = step.part.shape
        if waiting is not None:
            single = uses.count(waiting.output) == 1
            if node.op_type == "Relu" and node.input[0] == waiting.output and single:
                fused = _with_relu(waiting.part)
                yield Step(fused, waiting.inputs, step.output, f"{waiting.kind} Relu")
                waiting = None
                continue
            yield waiting
        waiting = step if step.part.relu else None
        if waiting is None:
            yield step
    if waiting is not None:
        yield waiting


def _with_relu(part: Part) -> Part:
    before = part.compute
    assert before is not None, "a convolution is computed"

    def compute(graph: Any, *tensors: Any) -> Any:
        return graph.relu(before(graph, *tensors))

    return attrs.evolve(part, compute=compute, relu=False)

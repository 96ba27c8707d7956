"""Preprocessing of inputs as part of the model.

``core.compile_model(..., preprocess={"image": Preprocess(...)})`` inserts ordinary operators after
an input, so that every device can run, fuse and partition them (OpenVINO's AddPreprocessing and
ConvertPrecision).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import attrs
import numpy as np

from subgraph.dtypes import FLOATS
from subgraph.errors import ConfigError, ShapeError, require_type
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.parameters import Parameter
from subgraph.graph.types import Array, Dim, TensorType, canonical_dtype, numpy_dtype
from subgraph.system.registry import nearest

_LAYOUTS = ("NCHW", "NHWC", "CHW", "HWC")


def _floats(values: Any) -> tuple[float, ...]:
    if values is None:
        return ()
    try:
        return tuple(float(v) for v in cast("Sequence[Any]", np.atleast_1d(values).tolist()))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"mean and scale take a number or several, got {values!r}") from error


@attrs.frozen
class Preprocess:
    """The conversions of an input before the model; without a setting its step is omitted.

    The caller's data have the dtype ``dtype`` and the layout ``layout``. They are converted to the
    model's dtype and layout, resized, ``mean`` is subtracted, and they are divided by ``scale``.

    Attributes:
        dtype: Dtype of the caller's data, for example "uint8"; empty: the model's.
        layout: Layout of the caller's data, "NHWC" or "HWC" for a model in NCHW; empty: the same.
        size: (height, width) of the caller's data: numbers, names, or None for any; resized to the
            model's by linear interpolation (half-pixel centres). None: the model's own size.
        mean: One number, or one for each channel.
        scale: One number, or one for each channel.
        model_layout: Layout of the model's input.
    """

    dtype: str = ""
    layout: str = ""
    size: tuple[Dim, Dim] | None = None
    mean: tuple[float, ...] = attrs.field(default=None, converter=_floats)
    scale: tuple[float, ...] = attrs.field(default=None, converter=_floats)
    model_layout: str = "NCHW"


def preprocessed(graph: Graph, steps: Mapping[str, Any]) -> Graph:
    """Return a graph with preprocessing before some of its inputs, which keep their names.

    Args:
        graph: The model; it is not changed.
        steps: `Preprocess`, or its fields as a dict, by input name.

    Raises:
        ConfigError: There is no such input, or a field is unknown or not possible for it.
    """
    require_type(steps, Mapping, ConfigError, "preprocessing by input name, in a dict")
    copy = graph.clone()
    by_name = {value.name: value for value in copy.inputs}
    replacements: dict[Value, Value] = {}
    outer: dict[Value, Value] = {}
    for name, wanted in steps.items():
        value = by_name.get(name)
        if value is None:
            raise ConfigError(f"no input {name!r} to preprocess; {nearest(name, by_name)}")
        chain = _Chain(name, value, _settings(name, wanted))
        outer[value] = chain.input
        replacements[value] = chain.build()
        # The model keeps the name for the caller's data; two values of a graph must not have the
        # same one.
        value.name = ""
    copy.rewire(replacements)
    copy.inputs = tuple(outer.get(value, value) for value in copy.inputs)
    return copy.clone()


def _settings(name: str, wanted: Any) -> Preprocess:
    if isinstance(wanted, Preprocess):
        return wanted
    require_type(wanted, Mapping, ConfigError, f"sg.Preprocess(...) or a dict for input {name!r}")
    known = attrs.fields_dict(Preprocess)
    for key in wanted:
        if key not in known:
            raise ConfigError(f"preprocessing of {name!r} has no {key!r}; {nearest(key, known)}")
    return Preprocess(**wanted)


class _Chain:
    """The nodes between the caller's data and the model's input."""

    def __init__(self, name: str, target: Value, settings: Preprocess) -> None:
        if not isinstance(target.type, TensorType):
            raise ConfigError(f"input {name!r} is {target.type or 'unknown'}, no tensor")
        self._name = name
        self._settings = settings
        self._type = target.type
        layout = settings.layout or settings.model_layout
        for each in (layout, settings.model_layout):
            if each not in _LAYOUTS:
                raise ConfigError(f"layout {each!r} of {name!r} is none of {', '.join(_LAYOUTS)}")
        if sorted(layout) != sorted(settings.model_layout):
            raise ConfigError(f"{name!r}: layout {layout} cannot become {settings.model_layout}")
        self._layout = layout
        try:
            dtype = canonical_dtype(settings.dtype) if settings.dtype else target.type.dtype
        except ShapeError as error:
            raise ConfigError(f"preprocessing of {name!r}: {error}") from error
        self._needs_layout = bool(settings.layout or settings.size or len(settings.mean) > 1)
        # One number for all channels needs no layout, so that inputs of any rank can be scaled.
        self._needs_layout |= len(settings.scale) > 1
        self._dtype = dtype
        self.input = Value(name, TensorType(dtype, self._outer_shape()))

    def _outer_shape(self) -> tuple[Dim, ...] | None:
        shape = self._type.shape
        if shape is None or not self._needs_layout:
            return shape
        inner = self._settings.model_layout
        if len(shape) != len(inner):
            raise ConfigError(
                f"input {self._name!r} is {self._type}, which does not have the layout {inner}"
            )
        dims = dict(zip(inner, shape, strict=True))
        if self._settings.size is not None:
            dims["H"], dims["W"] = self._settings.size
        return tuple(dims[axis] for axis in self._layout)

    def build(self) -> Value:
        value = self.input
        settings = self._settings
        arithmetic = bool(settings.size or settings.mean or settings.scale)
        if arithmetic and self._type.dtype not in FLOATS:
            raise ConfigError(f"input {self._name!r} is {self._type}: only floats are scaled")
        # The cast comes first, so that bytes are resized and scaled as floats, without rounding in
        # between.
        if self._dtype != self._type.dtype:
            from subgraph.graph.types import ONNX_DTYPE

            value = self._node("Cast", [value], 13, {"to": ONNX_DTYPE[self._type.dtype]})
        # The layout is converted before the resize, whose axes are those of the model.
        permutation = [self._layout.index(axis) for axis in settings.model_layout]
        if permutation != sorted(permutation):
            value = self._node("Transpose", [value], 13, {"perm": tuple(permutation)})
        if settings.size is not None:
            value = self._resized(value)
        if settings.mean:
            value = self._node("Sub", [value, self._per_channel("mean", settings.mean)], 14)
        if settings.scale:
            value = self._node("Div", [value, self._per_channel("scale", settings.scale)], 14)
        if value is self.input:
            value = self._node("Identity", [value], 16)
        value.type = self._type
        return value

    def _node(
        self,
        op_type: str,
        inputs: Sequence[Value | None],
        version: int,
        attributes: Mapping[str, Any] | None = None,
    ) -> Value:
        from subgraph.operators.inference import set_output_types

        name = f"{self._name}.{op_type.lower()}"
        node = Node(op_type, inputs, name=name, version=version, attrs=attributes)
        set_output_types(
            node, [None if v is None or not v.parameter else v.parameter.array for v in inputs]
        )
        node.outputs[0].name = name
        return node.outputs[0]

    def _parameter(self, kind: str, array: Array) -> Value:
        parameter = Parameter(f"{self._name}.{kind}", array)
        return Value(parameter.name, parameter.type, parameter=parameter)

    def _per_channel(self, kind: str, values: Sequence[float]) -> Value:
        array = np.array(values, numpy_dtype(self._type.dtype))
        if kind == "scale" and not array.all():
            raise ConfigError(f"scale of input {self._name!r} is zero")
        if array.size > 1:
            shape = [1] * len(self._settings.model_layout)
            axis = self._settings.model_layout.index("C")
            channels = self._type.shape[axis] if self._type.shape else None
            if isinstance(channels, int) and channels != array.size:
                raise ConfigError(
                    f"input {self._name!r} has {channels} channels, {kind} has {array.size} numbers"
                )
            shape[axis] = array.size
            array = array.reshape(shape)
        return self._parameter(kind, array)

    def _resized(self, value: Value) -> Value:
        shape = self._type.shape or ()
        layout = self._settings.model_layout
        sizes = dict(zip(layout, shape, strict=True))
        height, width = sizes["H"], sizes["W"]
        if not isinstance(height, int) or not isinstance(width, int):
            raise ConfigError(f"input {self._name!r} is {self._type}: its size must be known")
        axes = (layout.index("H"), layout.index("W"))
        wanted = self._parameter("sizes", np.array([height, width], np.int64))
        attributes = {
            "mode": "linear",
            "coordinate_transformation_mode": "half_pixel",
            "axes": axes,
        }
        return self._node("Resize", [value, None, None, wanted], 19, attributes)

"""Exported models: ``model.export_model`` writes one file, ``core.import_model`` reads it back.

The file (see `subgraph.devices.blob`) holds the partitioned graph as ONNX, its weights and their
packed forms, which an import maps, and a record of devices, options and versions. An import checks
all of it. A model for another machine or version is compiled again from the stored graph, if that
is allowed; so is a model that this user has not signed. Of such a file only the graph, the weights
and the names of the devices are used, and checked as `subgraph.onnx_format.file.load` checks a
model.
"""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import IO, TYPE_CHECKING, Any, cast

import attrs
import numpy as np

from subgraph._version import __version__
from subgraph.devices.blob import LARGE, BlobReader, BlobWriter, integer, read_header
from subgraph.devices.calls import capability_of
from subgraph.devices.exported_arrays import (
    ArrayExporter,
    ArrayImporter,
    add_array,
    stored_array,
)
from subgraph.dtypes import NOT_RAW
from subgraph.errors import (
    BlobError,
    ConfigError,
    DeviceError,
    LimitError,
    ModelError,
    SubgraphError,
    described,
)
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.parameters import Parameter, Unchecked, transaction
from subgraph.graph.result_arrays import is_array
from subgraph.graph.types import Array, TensorType, dtype_of
from subgraph.operators.subgraph_op import AFFINITY, DefaultSubgraphOp, SubgraphOp
from subgraph.partition.op_note import OP_NOTE
from subgraph.partition.regions import without_device_regions
from subgraph.runtime.compiled_model import CompiledModel
from subgraph.runtime.executor_plan import all_parameters
from subgraph.runtime.settings import DeviceOptions, property_access, unsaved_options
from subgraph.weights.cache import StoredWeights, WeightEntry

if TYPE_CHECKING:
    import onnx

    from subgraph.devices.device import Config, Device

Source = str | PathLike[str] | IO[bytes]
# Smaller weights are initializers of the ONNX message, without a section. An estimate.
_INLINE_MAX_BYTES = 1024
# Dtypes whose bytes in the file are those of an array; the tensor reader decodes others.
_MAPPED_DTYPES = frozenset(
    ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")
    if sys.byteorder == "little"
    else ()
)
ALLOW_RECOMPILE = "ALLOW_RECOMPILE"  # option of an import: may it compile the graph again?
_FOREIGN = (
    "it is not signed with your key, so that nothing but its graph and weights can be used (export "
    "it here, or give this machine the key of the machine that wrote it: see docs/devices.md)"
)


def region_nodes(graph: Graph) -> Iterator[Node]:
    """Yield the subgraph nodes of a graph and its bodies."""
    return (node for level in graph.levels() for node in level.nodes if node.subgraph is not None)


def export_model(model: CompiledModel, target: Source, content: str = "") -> None:
    """Write a compiled model: see `CompiledModel.export_model`.

    Args:
        model: The model.
        target: Path or binary stream.
        content: Key of the graph and weights that it was compiled from, which `import_model` can
            require. The file then has no weights: the import passes them.

    Raises:
        BlobError: a subgraph op cannot be exported.
    """
    for node in region_nodes(model.graph):
        if not _is_exportable(node):
            raise BlobError(
                f"node {node.name!r} runs by {type(node.op).__name__}, which does not say what to "
                "export: let a registered property make it, and write its to_export (and restore). "
                "Or save the graph with sg.save"
            )
    writer = BlobWriter()
    with transaction():  # no parameter changes while weights and packed weights are written
        names, model_part, weights = _add_graph(writer, model.graph, with_weights=not content)
        packed = _add_packed(writer, model.graph, names)
        renamed = any(name != p.name for p, name in names.items())
        exporter = ArrayExporter(writer, names, packed)
        # Ops refer to weights by the parameters' own names, which then are not those of the file.
        op_data = {} if renamed else _op_data(model.graph, exporter)
    header = {
        **_described(model, names),
        "content": content,
        "renamed": renamed,
        "op_data": op_data,
        "metrics": {k: v for k, v in model.metrics.items() if _is_plain(v)},
        "capability": {name: _capability(model, name) for name in _devices_of(model)},
        "requests": model.optimal_requests,
        "pipeline": [list(stage) for stage in model.pipeline],
        "model": model_part,
        "weights": weights,
        "packed": list(packed.values()),
    }
    writer.write(header, target)


def _is_exportable(node: Node) -> bool:
    """Return whether an import can make a region's op again, by its device or its property."""
    notes = node.metadata or {}
    if AFFINITY in notes or type(node.op) is DefaultSubgraphOp:
        return True
    op: SubgraphOp | None = node.op
    exports = op is not None and type(op).to_export is not SubgraphOp.to_export
    return OP_NOTE in notes and exports


def export_several(
    model: CompiledModel, parts: Mapping[str, CompiledModel], target: Source
) -> None:
    """Write a model that consists of one compiled model for each of several devices.

    Args:
        model: The model of all devices.
        parts: The devices' models by the device's name.
        target: Path or binary stream.

    Raises:
        BlobError: one of them cannot be exported.
    """
    writer = BlobWriter()
    places: dict[str, dict[str, int]] = {}
    renamed = False
    with transaction():  # all parts have the same versions of the weights
        for name, part in parts.items():
            stream = io.BytesIO()
            export_model(part, stream)
            stream.seek(0)
            renamed |= bool(read_header(stream)["renamed"])
            places[name] = writer.add(stream.getbuffer())
    if renamed:  # the parts share weights by name, which is then impossible
        export_model(model, target)
        return
    writer.write({**_described(model, {}), "models": places}, target)


def _described(model: CompiledModel, names: Mapping[Parameter, str]) -> dict[str, Any]:
    """Return the entries of every header; ``names`` are the parameters' names in the file."""
    return {
        "subgraph": __version__,
        "byteorder": sys.byteorder,
        "name": model.name,
        "device": model.device,
        "options": _plain_options(model.options),
        "configs": _saved_options(model.configs),
        "inputs": [[port.name, str(port.type or "?")] for port in model.inputs],
        "defaults": {
            # A parameter that only bodies use is an initializer of a body, under its own name.
            p.name: names.get(p.default, p.default.name)
            for p in model.inputs
            if p.default is not None
        },
        "outputs": [[port.name, str(port.type or "?")] for port in model.outputs],
    }


def _plain_options(options: DeviceOptions) -> dict[str, Any]:
    access = property_access(options)
    return _saved_options({k: v for k, v in attrs.asdict(options).items() if access[k] == "RW"})


def _saved_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options without those that files do not contain; values may be devices' options."""
    unsaved = unsaved_options()
    return {
        key: _saved_options(cast("Mapping[str, Any]", v)) if isinstance(v, Mapping) else v
        for key, v in options.items()
        if key not in unsaved
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        held = cast("Mapping[Any, Any]", value)
        return all(isinstance(k, str) and _is_plain(v) for k, v in held.items())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(v) for v in cast("Sequence[Any]", value))
    return isinstance(value, (str, int, float, bool))


def _devices_of(model: CompiledModel) -> list[str]:
    """Return the devices that compiled the regions, and those that a property's ops run on."""
    nodes = list(region_nodes(model.graph))
    names = dict.fromkeys((n.metadata or {}).get(AFFINITY, "") for n in nodes)
    names.pop("", None)
    found = [*names] or [model.device.partition(":")[0]]  # which runs the model without regions
    others = (n.op.device for n in nodes if n.op is not None and n.op.device not in found)
    return [*found, *(name for name in dict.fromkeys(others) if _is_device(model, name))]


def _is_device(model: CompiledModel, name: str) -> bool:
    """Return whether the model's Core has a device of this name; a user's op may have any name."""
    try:
        return model.known_device(name) is not None
    except DeviceError:
        return False


def _capability(model: CompiledModel, name: str) -> dict[str, str]:
    device = model.known_device(name)
    return {} if device is None else capability_of(device)


def _add_graph(
    writer: BlobWriter, graph: Graph, *, with_weights: bool
) -> tuple[dict[Parameter, str], dict[str, int], dict[str, Any]]:
    """Add the graph and its weights to a file.

    Returns:
        The parameters' names in the file, the place of the graph, and the places of the weights.
    """
    from subgraph.onnx_format.writer import GraphWriter, add_external
    from subgraph.operators.protobuf import tensor_to_proto

    converted = GraphWriter(graph)
    proto = converted.model()
    weights: dict[str, Any] = {}
    for name, array in converted.weights:
        if array.nbytes < _INLINE_MAX_BYTES or dtype_of(array) in NOT_RAW:
            proto.graph.initializer.append(tensor_to_proto(array, name))
            continue
        if with_weights:
            weights[name] = writer.add(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        add_external(proto, name, array, location="weights")
    return converted.names, writer.add(proto.SerializeToString()), weights


def _add_packed(
    writer: BlobWriter, graph: Graph, names: Mapping[Parameter, str]
) -> dict[WeightEntry, dict[str, Any]]:
    """Add the packed weights of the regions; return the header's table of each."""
    packed: dict[WeightEntry, dict[str, Any]] = {}
    for node in region_nodes(graph):
        op: SubgraphOp | None = node.op
        if op is None:
            continue
        _call(op, node.name, "prepare")
        for entry in op.weights:
            known = all(p in names for p in entry.parameters)
            # Regions may share an entry. One without parameters depends on no weight of the file,
            # and the op computes it again.
            if entry in packed or not known or not entry.parameters:
                continue
            array = entry.get()
            if not is_array(array):  # such as a library's model, which the op makes again
                continue
            if dtype_of(array) in NOT_RAW or entry.bytes == 0:
                continue
            packed[entry] = {
                "recipe": entry.recipe,
                "parameters": [names[p] for p in entry.parameters],
                "align": entry.align,
                **add_array(writer, array),
            }
    return packed


def _op_data(graph: Graph, exporter: ArrayExporter) -> dict[str, Any]:
    """Return the data that the regions' ops export, by the region's name if no other has it."""
    nodes = [node for node in region_nodes(graph) if node.op is not None]
    # Nodes in different bodies may have the same name.
    counts = Counter(node.name for node in nodes)
    single = [node for node in nodes if counts[node.name] == 1]
    ops: dict[str, SubgraphOp] = {node.name: node.op for node in single}
    found = {name: _call(op, name, "to_export", exporter) for name, op in ops.items()}
    for name, data in found.items():
        method = f"node {name!r}: {type(ops[name]).__name__}.to_export"
        if data is not None and not isinstance(data, dict):
            raise BlobError(f"{method} returned {data!r}; return a dict of plain JSON, or None")
        try:
            json.dumps(data, sort_keys=True)
        except (TypeError, ValueError, RecursionError) as error:
            raise BlobError(
                f"{method} returned a dict that is no plain JSON: {described(error)}; store arrays "
                "with file.array(array)"
            ) from error
    return {name: data for name, data in found.items() if data is not None}


def _call(op: SubgraphOp, node: str, method: str, *args: Any) -> Any:
    """Call a method of a region's op, which may be a user's; an error names node and method."""
    try:
        return getattr(type(op), method)(op, *args)
    except (SubgraphError, OSError, MemoryError):
        raise
    except Exception as error:
        where = f"node {node!r}: {type(op).__name__}.{method}"
        raise BlobError(f"{where} raised {described(error)}; correct that method") from error


def _restore(graph: Graph, reader: BlobReader) -> None:
    """Pass the exported data of the regions' ops to the ops."""
    op_data = _table(reader.header, "op_data")
    file = ArrayImporter(reader, {p.name: p for p in all_parameters(graph)})
    for node in region_nodes(graph):
        found = op_data.get(node.name)
        op: SubgraphOp | None = node.op
        if op is not None and isinstance(found, dict):
            _call(op, node.name, "restore", cast("dict[str, Any]", found), file)


def exported_device(source: Source) -> str:
    """Return the device string that a file was compiled for.

    Raises:
        BlobError: the file is damaged or no exported model.
    """
    device = read_header(source).get("device")
    if not isinstance(device, str) or not device:
        raise BlobError("the file does not say its device; name one")
    return device.partition(":")[0]


def import_model(
    device: Device,
    source: Source | memoryview,
    config: Config | None,
    parameters: Mapping[str, Parameter] | None = None,
    content: str | None = None,
) -> CompiledModel:
    """Read a model: see `Device.import_model`.

    Args:
        device: The device.
        source: The file: a path, a binary stream, or a section of another file.
        config: The device's options, and ``ALLOW_RECOMPILE``.
        parameters: Parameters by name that the model uses instead of the file's weights; they must
            have the same values.
        content: The ``content`` that the file must have been exported with; None: any.

    Raises:
        BlobError: the file is damaged or does not fit.
    """
    options = dict(config or {})
    allowed = options.pop(ALLOW_RECOMPILE, True)
    reader = BlobReader(source)
    if content is not None and reader.header.get("content") != content:
        raise BlobError(f"{reader.name} is of another model")
    try:
        device = _importer(device, str(reader.header.get("device")))
        return _imported(device, reader, options, bool(allowed), parameters)
    except (BlobError, ConfigError, LimitError):
        # The header is checked where it is used, often by the error that wrong content causes, so
        # that all kinds of errors mean a damaged file. These three have their own meaning.
        raise
    except (
        SubgraphError,
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
        ArithmeticError,
    ) as error:
        raise BlobError(f"{reader.name} cannot be imported: {described(error)}") from error


def _importer(device: Device, compiled_for: str) -> Device:
    """Return HETERO for a model that needs the device's fallback devices, else the device."""
    if device.fallback and compiled_for == f"HETERO:{','.join((device.name, *device.fallback))}":
        return device.peer_named("HETERO")
    return device


def _imported(
    device: Device,
    reader: BlobReader,
    config: dict[str, Any],
    allowed: bool,
    parameters: Mapping[str, Parameter] | None,
) -> CompiledModel:
    header = reader.header
    if header.get("byteorder") != sys.byteorder:
        raise BlobError(f"{reader.name} was written on a machine of another byte order")
    if "models" in header:
        return _import_several(device, reader, config, allowed)
    if parameters is not None and header.get("renamed") is not False:
        raise BlobError(f"{reader.name} names its weights otherwise than the graph")
    # A damaged model of the cache is compiled again, so all damage has to be found here. Other
    # models check large sections when these are first read.
    reader.check_body(large=parameters is not None)
    graph = _read_graph(reader, parameters)
    # A compiled program is code. Only a file that this user's key signed may contribute any.
    problems = _problems(device, header) if reader.own else [_FOREIGN]
    merged = _merged(device, reader, config)
    if problems:
        if not allowed:
            raise BlobError(f"{reader.name} does not fit: {'; '.join(problems)}")
        model = device.recompile(without_device_regions(graph), merged)
        _offer_defaults(model, model.graph, header)
        return model
    stored = _stored_weights(reader, graph)
    model = device.import_graph(graph, merged, header, stored)
    _restore(model.graph, reader)
    _offer_defaults(model, graph, header)
    return model


def _import_several(
    device: Device, reader: BlobReader, config: dict[str, Any], allowed: bool
) -> CompiledModel:
    """Return the model of a file that `export_several` wrote."""
    header = reader.header
    parts = {name: reader.part(place) for name, place in _table(header, "models").items()}
    if not parts:
        raise BlobError(f"{reader.name} is damaged: it holds no model")
    options = {**_merged(device, reader, config), ALLOW_RECOMPILE: allowed}
    model = device.import_parts(parts, options)
    _offer_defaults(model, model.graph, header)
    return model


def _merged(device: Device, reader: BlobReader, config: Config) -> dict[str, Any]:
    """Return the options of a file and of the import, which come first.

    The file's options are used only if it was compiled for this device; of a file that this user
    has not signed, only the devices' names.
    """
    header = reader.header
    name, _, priorities = str(header.get("device")).partition(":")
    if name != device.name:
        return dict(config)
    if not reader.own:
        return {**({"DEVICE_PRIORITIES": priorities} if priorities else {}), **config}
    configs = _table(header, "configs")
    if "DEVICE_PRIORITIES" in config:  # options of devices that are not listed would be refused
        wanted = str(config["DEVICE_PRIORITIES"]).replace(",", " ").split()
        configs = {name: values for name, values in configs.items() if name in wanted}
    return {**_saved_options({**_table(header, "options"), **configs}), **config}


def _offer_defaults(model: CompiledModel, graph: Graph, header: Mapping[str, Any]) -> None:
    """Let calls replace the weights that were inputs with a default in the exported model."""
    weights = {p.name: p for p in all_parameters(graph)}
    plain = {value.name: value for value in graph.inputs}
    defaults = _table(header, "defaults")
    if not defaults:
        return
    listed: list[Value] = []
    for name, _ in cast("list[list[str]]", header["inputs"]):
        if name in plain:
            listed.append(plain[name])
        elif defaults.get(name) in weights:
            default = weights[defaults[name]]
            listed.append(Value(name, default.type, parameter=default))
    model.offer_defaults(listed)


def _problems(device: Device, header: Mapping[str, Any]) -> list[str]:
    """Return the differences between this machine and version and those of the file."""
    problems: list[str] = []
    if header.get("subgraph") != __version__:
        problems.append(f"made by Subgraph {header.get('subgraph')}, this is {__version__}")
    compiled_for = str(header.get("device", ""))
    if compiled_for.partition(":")[0] != device.name:
        problems.append(f"compiled for {compiled_for}, not for {device.name}")
    for name, capability in _table(header, "capability").items():
        try:
            now = capability_of(device.peer_named(name))
        except DeviceError as error:
            problems.append(str(error))
            continue
        was = cast("dict[str, str]", capability)
        changed = [f"{k} {was.get(k)!r}, here {now.get(k)!r}" for k in now if was.get(k) != now[k]]
        if changed:
            problems.append(f"compiled for another {name}: {', '.join(changed)}")
    return problems


def _table(header: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = header.get(key)
    if not isinstance(found, dict):
        raise BlobError(f"the header is damaged: {key!r} is no table")
    return cast("dict[str, Any]", found)


def _read_graph(reader: BlobReader, parameters: Mapping[str, Parameter] | None) -> Graph:
    from subgraph.onnx_format.file import load_message
    from subgraph.onnx_format.reader import GraphReader
    from subgraph.onnx_format.tensors import TensorReader
    from subgraph.operators.protobuf import dtype_from_number
    from subgraph.operators.type_inference import infer_graph
    from subgraph.partition.restore import restore_ops
    from subgraph.system.gc_control import paused_gc

    places = _table(reader.header, "weights")

    class Mapped(TensorReader):
        """Reads weights from the sections of the file."""

        def _external(self, proto: onnx.TensorProto, dtype: str, shape: tuple[int, ...]) -> Array:
            known = None if parameters is None else parameters.get(proto.name)
            if known is not None and known.type == TensorType(dtype, shape):
                return known.array
            part = reader.part(self._place(proto))
            return self._view(proto, dtype, shape, part, 0, len(part))

        def weight(self, proto: onnx.TensorProto) -> Array | Unchecked:
            place = places.get(proto.name)
            known = parameters is not None and proto.name in parameters
            dtype, shape = dtype_from_number(proto.data_type), tuple(proto.dims)
            mapped = dtype in _MAPPED_DTYPES and all(dim >= 0 for dim in shape)
            # A small section shares its leaf with others and is checked with them at once.
            if known or not mapped or place is None or integer(place, "size") < LARGE:
                return self.array(proto)
            part, leaves = reader.unchecked(place)
            array = self._view(proto, dtype, shape, part, 0, len(part))
            return Unchecked(array, reader, leaves)

        def _place(self, proto: onnx.TensorProto) -> Any:
            if proto.name not in places:
                raise BlobError(f"{reader.name} is damaged: weight {proto.name!r} is missing")
            return places[proto.name]

    try:
        with paused_gc():
            proto = _message(bytes(reader.part(reader.header.get("model"))))
            if not reader.own:
                # A file of someone else is read like any model of an unknown source: at once, with
                # all checks.
                return load_message(proto, Mapped())
            # The file is this user's own, so that regions can be read when needed; a compiled one
            # seldom is.
            graph = GraphReader(proto, Mapped(), "inline", parameters=parameters, lazy=True).read()
            if any(value.type is None for value in graph.values()):
                infer_graph(graph, strict=False)
            restore_ops(graph)
            return graph
    except ModelError as error:
        raise BlobError(f"{reader.name}: its graph cannot be read: {error}") from error


def _message(data: bytes) -> onnx.ModelProto:
    from subgraph.operators.messages import ModelProto

    try:
        proto: onnx.ModelProto = ModelProto.FromString(data)
    except Exception as error:  # protobuf's DecodeError is no child of a common class
        raise ModelError(f"not an ONNX model: {error}") from error
    return proto


def _stored_weights(reader: BlobReader, graph: Graph) -> StoredWeights:
    by_name = {p.name: p for p in all_parameters(graph)}
    stored = StoredWeights()
    packed = reader.header.get("packed")
    for item in cast("list[dict[str, Any]]", packed if isinstance(packed, list) else []):
        parameters = tuple(by_name[name] for name in item["parameters"] if name in by_name)
        # A packed weight of parameters that the graph does not have can never be used.
        if len(parameters) != len(item["parameters"]):
            continue
        shape = [int(dim) for dim in item["shape"]]
        array = stored_array(reader, item["place"], str(item["dtype"]), shape)
        stored.add(str(item["recipe"]), parameters, int(item["align"]), array)
    return stored

"""Damage to honest samples: sizes, ranks, indices, numbers and attributes that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import onnx

from subgraph.graph.types import Array
from wrong_sizes.graphs import graph_of
from wrong_sizes.runs import make_model
from wrong_sizes.samples import Operand, Sample, samples

FORMS = ("sizes", "symbolic", "symbolic", "unknown", "constants", "all constants")
OPERAND_SETS = 6  # of a model that is declared without sizes
_TWICE = 0.25  # share of samples that are damaged in two places
_HUGE = (1 << 31, (1 << 31) - 1, 1 << 62, (1 << 63) - 1, -(1 << 31), -(1 << 63))
_NUMBERS = (0.0, -1.0, float("nan"), float("inf"), float("-inf"), 1e38, 1e-40)
_TEXTS = ("", "none", "constant", "NOTSET", "SAME_UPPER", "reverse", "Ä", "x" * 1000)
_MAX_TRIPS = 1000  # iterations of a Loop; tests/operators/test_wrong_size_findings.py has more
_MAX_CHANGED = 4096  # elements of an operand of which one is changed


@attrs.define(eq=False)
class Damaged:
    """Operands of a case, and what was done to them.

    Attributes:
        values: Operands by name.
        what: The damage.
    """

    values: dict[str, Operand]
    what: str


@attrs.define(eq=False)
class Case:
    """A damaged sample: a model, and the sets of operands that it runs in turn.

    Attributes:
        number: Its number.
        honest: The sample as it was.
        node: The node, its attributes perhaps damaged.
        form: How the model declares the operands.
        constant: Names of operands that are constants.
        sets: The damaged operands. There is one set unless the model is declared without sizes.
    """

    number: int
    honest: Sample
    node: onnx.NodeProto
    form: str
    constant: frozenset[str]
    sets: list[Damaged]

    def text(self, position: int = 0) -> str:
        """The case with one of its sets of operands, in a line."""
        chosen = self.sets[position]
        shown = [
            f"{name}={_shown(v)}{'!' if name in self.constant else ''}"
            for name, v in chosen.values.items()
        ]
        options = [str(onnx.helper.printable_attribute(a)) for a in self.node.attribute]
        text = f"{self.honest.title}({', '.join(shown)}; {', '.join(options)})"
        before = f" after {self.honest.source}" if self.honest.before else ""
        return f"{text[:500]}{before} as {self.form}; {chosen.what}"

    def model(self, declared: dict[str, Operand]) -> onnx.ModelProto:
        """Return the model of the case, its inputs declared for the operands ``declared``."""

        def shape(name: str) -> Any:
            value = declared[name]
            assert isinstance(value, np.ndarray)
            symbolic = [f"{name}_{axis}" for axis in range(value.ndim)]
            return {"symbolic": symbolic, "unknown": None}.get(self.form, value.shape)

        honest, nodes = self.honest, [*self.honest.before, self.node]
        return make_model(nodes, declared, honest.types, honest.opsets, shape, self.constant)


def _shown(value: Operand) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    return "/".join(map(_shown, value)) if isinstance(value, list) else str(value)


def make_case(seed: int, number: int, only: str = "", nodes: int = 1) -> Case:
    """Return a case; always the same for the same arguments.

    Args:
        seed: Seed of a series of cases.
        number: Number of the case in the series.
        only: Operators to choose from, separated by commas; "" for all.
        nodes: Number of samples that the model joins.
    """
    rng = np.random.default_rng([seed, number])
    if nodes > 1:
        sample = graph_of(nodes, only, rng)
    else:
        known = samples(only)
        group = known[number % len(known)]
        sample = group[int(rng.integers(len(group)))]
    node = onnx.NodeProto()
    node.CopyFrom(sample.node)
    form = FORMS[int(rng.integers(len(FORMS)))]
    # Attributes first, for all sets of operands. A sample without operands has nothing else.
    done = ""
    if node.attribute and (not sample.values or rng.random() < 1 / 3):
        done = _change_attribute(node, rng)
    count = OPERAND_SETS if form in ("symbolic", "unknown") and sample.values else 1
    sets = [_damaged(sample, done, position > 0, rng) for position in range(count)]
    arrays = [name for name, value in sample.values.items() if isinstance(value, np.ndarray)]
    constant = frozenset[str]()
    if form == "constants":
        constant = frozenset(name for name in arrays if rng.random() < 0.5)
    elif form == "all constants":
        constant = frozenset(arrays[1:])
    return Case(number, sample, node, form, constant, sets)


def _damaged(sample: Sample, done: str, further: bool, rng: np.random.Generator) -> Damaged:
    """Return operands of which one or two are damaged.

    Args:
        sample: The sample.
        done: What was done to its attributes, which counts as one damage; "" for nothing.
        further: Damage an operand even if an attribute is damaged.
        rng: Random numbers.
    """
    values = dict(sample.values)
    count = (1 if rng.random() >= _TWICE else 2) + (further and bool(done))
    what = [done] if done else []
    # A Loop runs as long as its count says, until it is cancelled.
    loops = any(node.op_type == "Loop" for node in (*sample.before, sample.node))
    most = _MAX_TRIPS if loops else None
    while values and len(what) < count:
        what.append(_damage(values, most, rng))
    return Damaged(values, " and ".join(what) or "nothing")


def _damage(values: dict[str, Operand], most: int | None, rng: np.random.Generator) -> str:
    """Damage one operand, with integers up to ``most``; return what was done."""
    name = list(values)[int(rng.integers(len(values)))]
    value = values[name]
    if isinstance(value, list):
        values[name], what = _damaged_list(value, rng)
        return f"{name} {what}"
    if not isinstance(value, np.ndarray):
        return f"{name} as it was"
    changeable = 0 < value.size <= _MAX_CHANGED and value.dtype.name in _CHANGED
    if changeable and rng.random() < 1 / 3:
        values[name], what = _with_a_value(value, values, most, rng)
        return f"{name}{what}"
    values[name], what = _resized(value, rng)
    return f"{name} {what}"


def _damaged_list(items: list[Array], rng: np.random.Generator) -> tuple[list[Array], str]:
    how = int(rng.integers(4)) if items else 3
    if how == 0:
        return items[:-1], "one item shorter"
    if how == 1:
        return [], "empty"
    if how == 2:
        at = int(rng.integers(len(items)))
        item, what = _resized(items[at], rng)
        return [*items[:at], item, *items[at + 1 :]], f"[{at}] {what}"
    return [*items, items[-1] if items else np.zeros((2, 3), np.float32)], "one item longer"


def _resized(array: Array, rng: np.random.Generator) -> tuple[Array, str]:
    """Return an array with another shape, and what was done."""
    axis = int(rng.integers(array.ndim)) if array.ndim else 0
    ways: dict[str, Callable[[], Array]] = {
        "with a dimension of 1 more": lambda: array[None],
        "with a dimension of 2 more": lambda: np.stack([array, array]),
        "with a last dimension of 1 more": lambda: array[..., None],
    }
    if array.ndim:
        size = array.shape[axis]
        for text, to in (
            ("one longer", size + 1),
            ("one shorter", max(size - 1, 0)),
            ("empty", 0),
            ("one", 1),
            ("twice as long", 2 * size),
            ("much longer", size + 17),
        ):
            ways[f"{text} along {axis}"] = lambda to=to: _taken(array, axis, to)
        ways[f"without dimension {axis}"] = lambda: _taken(array, axis, 1).squeeze(axis)
        ways["scalar"] = lambda: _first(array)
        ways["transposed"] = lambda: array.T
        ways["flat"] = lambda: array.reshape(-1)
    text = list(ways)[int(rng.integers(len(ways)))]
    made = ways[text]()
    return np.ascontiguousarray(made).reshape(made.shape), text


def _first(array: Array) -> Array:
    """Return the first element as a scalar."""
    nothing = "" if array.dtype == object else 0
    return np.asarray(array.reshape(-1)[0] if array.size else nothing, array.dtype)


def _taken(array: Array, axis: int, size: int) -> Array:
    """Return ``size`` slices of an array along an axis, from the beginning again where needed."""
    if array.shape[axis] == 0:
        shape = [size if k == axis else n for k, n in enumerate(array.shape)]
        return np.full(shape, "" if array.dtype == object else 0, array.dtype)
    return np.take(array, np.arange(size) % array.shape[axis], axis)


_FLOATS = frozenset(("float16", "float32", "float64"))
_CHANGED = _FLOATS | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}


def _with_a_value(
    array: Array, values: Mapping[str, Operand], most: int | None, rng: np.random.Generator
) -> tuple[Array, str]:
    """Return an array with another number somewhere, or everywhere, and what was done.

    Args:
        array: The array.
        values: All operands; near their sizes integers are most likely to be taken.
        most: The greatest integer; None for any.
        rng: Random numbers.
    """
    array = np.array(array)
    pool: list[Any] = list(_NUMBERS)
    if array.dtype.kind in "iu":
        info = np.iinfo(array.dtype)
        shapes = [v.shape for v in values.values() if isinstance(v, np.ndarray)]
        sizes = sorted({n for shape in shapes for n in shape})
        near = [sign * (n + by) for n in sizes for sign in (1, -1) for by in (-1, 0, 1)]
        all_ = [0, -1, 1, *near, *_HUGE, info.min, info.max]
        pool = [min(max(value, int(info.min)), int(info.max)) for value in all_]
        pool = [value for value in pool if most is None or value <= most]
    value = pool[int(rng.integers(len(pool)))]
    place: Any = "all" if rng.random() < 0.2 else int(rng.integers(array.size))
    array.reshape(-1)[slice(None) if place == "all" else place] = value
    return array, f"[{place}] = {value}"


# --- attributes --------------------------------------------------------------------------------


def _change_attribute(node: onnx.NodeProto, rng: np.random.Generator) -> str:
    """Change one attribute of a node, or leave it out; return what was done."""
    at = int(rng.integers(len(node.attribute)))
    attribute = node.attribute[at]
    change = _ATTRIBUTES.get(attribute.type)
    if change is None or rng.random() < 1 / 16:
        name = attribute.name
        del node.attribute[at]
        return f"without {name}"
    before = onnx.helper.get_attribute_value(attribute)
    after = change(before, rng)
    attribute.CopyFrom(onnx.helper.make_attribute(attribute.name, after, attr_type=attribute.type))
    return f"{attribute.name} = {_brief(after)} for {_brief(before)}"


def _brief(value: Any) -> str:
    if isinstance(value, onnx.TensorProto):
        return f"a tensor of {list(value.dims)}"
    return str(value)[:60]


def _other_int(value: int, rng: np.random.Generator) -> int:
    pool = (0, -1, 1, 2, value + 1, value - 1, -value, 2 * value, *_HUGE)
    return min(max(pool[int(rng.integers(len(pool)))], -(1 << 63)), (1 << 63) - 1)


def _other_float(_: float, rng: np.random.Generator) -> float:
    return _NUMBERS[int(rng.integers(len(_NUMBERS)))]


def _other_list(values: Sequence[Any], rng: np.random.Generator) -> list[Any]:
    changed = list(values)
    how = int(rng.integers(4)) if changed else 1
    if how < 2:
        return changed[:-1] if how == 0 else [*changed, changed[-1] if changed else 1]
    at = int(rng.integers(len(changed)))
    changed[at] = _CHANGES_OF_ITEMS[type(changed[at])](changed[at], rng)
    return changed


def _other_text(_: bytes, rng: np.random.Generator) -> str:
    return _TEXTS[int(rng.integers(len(_TEXTS)))]


def _other_tensor(tensor: onnx.TensorProto, rng: np.random.Generator) -> onnx.TensorProto:
    array, _ = _resized(onnx.numpy_helper.to_array(tensor), rng)
    return onnx.numpy_helper.from_array(array, tensor.name)


_CHANGES_OF_ITEMS: dict[type, Callable[..., Any]] = {
    int: _other_int,
    float: _other_float,
    bytes: _other_text,
}
_ATTRIBUTES: dict[int, Callable[..., Any]] = {
    onnx.AttributeProto.INT: _other_int,
    onnx.AttributeProto.FLOAT: _other_float,
    onnx.AttributeProto.INTS: _other_list,
    onnx.AttributeProto.FLOATS: _other_list,
    onnx.AttributeProto.STRING: _other_text,
    onnx.AttributeProto.STRINGS: _other_list,
    onnx.AttributeProto.TENSOR: _other_tensor,
}

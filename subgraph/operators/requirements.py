"""Requirements: what the operands and attributes of an operator must satisfy.

A family's ``op.py`` has one function for each operator, and names it in the declaration:

    def gather_operands(node: Node, x: Tensor, indices: Tensor) -> None:
        axis = require_axis(node, x.rank)
        ...

    declare("Gather", requires=gather_operands, ...)

The arguments are the node and its operands in order, each a `Tensor`, or None for an omitted
optional one. The function raises `ShapeError` (by `require`) for operands that do not fit. It is
called once every operand's rank is known; sizes may be unknown. Underscores begin the names of
operands that it does not read. An operand that is annotated as a `ValueType` (or `Operand`) may be
a sequence, an optional or a map, and is then its type; for other operands these are errors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import attrs
import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph.graph import Node
from subgraph.graph.types import Array, ValueType


class _AnySize:
    """A size that is not known: every comparison with it is true, arithmetic on it returns it.

    A conjunction of comparisons thus fails only by sizes that are known.
    """

    __slots__ = ()

    def _same(self, *_: object) -> Any:
        return self

    def _holds(self, _: object) -> bool:
        return True

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _same
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __neg__ = __abs__ = _same
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _holds
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return "?"


ANY_SIZE: Any = _AnySize()


def is_known(size: int) -> bool:
    """Return whether a size of a `Tensor` is a number, on which a requirement may branch."""
    return size is not ANY_SIZE


@attrs.define(eq=False, slots=True)
class Tensor:
    """An operand of a requirement; read only.

    Attributes:
        dtype: Name of the element type.
        shape: Sizes; `ANY_SIZE` for one that is not known, which compares as equal to, smaller and
            greater than every number. Branch on a size only if `is_known`.
        known: The elements, if they are known: of a constant, or of a value at run time.
    """

    dtype: str
    shape: tuple[int, ...]
    known: Array | None = None

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements; `ANY_SIZE` if a dimension is not known."""
        product: Any = 1
        for dim in self.shape:
            product = product * dim
        return product  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


_ONLY_TENSORS = frozenset({Tensor})
# (node, one operand for each input of the schema; None where one is omitted) -> None
Requirement = Callable[..., None]


@attrs.frozen(eq=False)
class Rule:
    """A requirement, with the numbers of operands in its signature.

    Attributes:
        function: The function, which raises ShapeError for operands that do not fit.
        needed: Positions of the operands that must not be omitted.
        least: Number of parameters for operands that have no default.
        most: Largest number of operands; None: any number.
        sequences: Whether an operand may be other than a tensor.
        unused: Positions of the operands that the function does not read.
        needed_from: First position of a variadic parameter whose operands must not be omitted;
            None: there is no such parameter.
    """

    function: Requirement
    needed: tuple[int, ...]
    least: int
    most: int | None
    sequences: bool
    unused: frozenset[int] = frozenset()
    needed_from: int | None = None

    def check(self, node: Node, operands: list[Any]) -> None:
        """Check the number and kinds of the operands, then call the function.

        Args:
            node: The node.
            operands: A `Tensor`, another type, or None (omitted) for each input; changed in place.

        Raises:
            ShapeError: the operands do not fit.
        """
        count = len(operands)
        fits = count >= self.least and (self.most is None or count <= self.most)
        if fits and _ONLY_TENSORS.issuperset(map(type, operands)):  # the most frequent case
            self.function(node, *operands)
            return
        if self.needed_from is not None and None in operands[self.needed_from :]:
            raise ShapeError(f"input {operands.index(None, self.needed_from)} is missing")
        # ONNX lets a node leave out optional inputs at the end, or state them as empty names.
        while operands and operands[-1] is None:
            operands.pop()
        if self.most is not None and len(operands) > self.most:
            raise ShapeError(f"{len(operands)} inputs are given, at most {self.most} are taken")
        for k in self.needed:
            if k >= len(operands) or operands[k] is None:
                raise ShapeError(f"input {k} is missing")
        if not self.sequences:
            for k, operand in enumerate(operands):
                if operand is not None and not isinstance(operand, Tensor):
                    raise ShapeError(f"input {k} is {operand}, a tensor is needed")
        # The function's signature names all operands that it checks, so that omitted ones are
        # passed as None.
        operands += [None] * (self.least - len(operands))
        self.function(node, *operands)


def rule_from_signature(function: Requirement) -> Rule:
    """Return the rule of a requirement's function, from its signature."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    least = [p for p in positional if p.default is p.empty]
    # An annotation may be a string or a type. The text of both shows whether None is allowed.
    needed = [k for k, p in enumerate(least) if "None" not in str(p.annotation)]
    variadic = [p for p in parameters if p.kind is p.VAR_POSITIONAL]
    most = None if variadic else len(parameters)
    all_needed = any(p.annotation in ("Tensor", Tensor) for p in variadic)
    unused = frozenset(k for k, p in enumerate(positional) if p.name.startswith("_"))
    kinds = [str(p.annotation) for p in parameters if p.annotation is not p.empty]
    sequences = any("ValueType" in kind or "Operand" in kind for kind in kinds)
    needed_from = len(positional) if all_needed else None
    return Rule(function, tuple(needed), len(least), most, sequences, unused, needed_from)


def any_tensor(node: Node, x: Tensor) -> None:
    """Accept every tensor."""


def any_value(node: Node, x: ValueType | Tensor) -> None:
    """Accept every value, also sequences, optionals and maps."""


def require(condition: bool, message: str, *values: object) -> None:
    """Raise ShapeError with ``message.format(*values)`` unless ``condition`` holds."""
    if not condition:
        raise ShapeError(message.format(*values))


def require_rank(name: str, operand: Tensor, *ranks: int) -> None:
    """Raise ShapeError unless an operand, called ``name`` in the standard, has one of ``ranks``."""
    if operand.rank not in ranks:
        wanted = " or ".join(map(str, ranks))
        raise ShapeError(f"{name} has shape {list(operand.shape)}; it needs rank {wanted}")


def require_shape(name: str, operand: Tensor | None, shape: Sequence[int], why: str) -> None:
    """Raise ShapeError unless an operand has this shape or is omitted.

    Args:
        name: The operand's name in the standard.
        operand: The operand, None where it is omitted.
        shape: The sizes that it must have.
        why: Where these sizes come from, such as "one for each of 64 output channels".
    """
    if operand is None:
        return
    if operand.shape != tuple(shape):
        found = list(operand.shape)
        raise ShapeError(f"{name} has shape {found}, {list(shape)} is needed: {why}")


def require_dtype(name: str, operand: Tensor | None, *dtypes: str) -> None:
    """Raise ShapeError unless an operand has one of these dtypes or is omitted.

    Args:
        name: The operand's name in the standard.
        operand: The operand, None where it is omitted.
        *dtypes: Names of the allowed dtypes.
    """
    if operand is not None and operand.dtype not in dtypes:
        raise ShapeError(f"{name} is {operand.dtype}; it must be {' or '.join(dtypes)}")


def require_broadcast(name: str, operand: Tensor | None, shape: Sequence[int], what: str) -> None:
    """Raise ShapeError unless an operand broadcasts to a shape by NumPy's rules or is omitted.

    Args:
        name: The operand's name in the standard.
        operand: The operand, None where it is omitted.
        shape: The shape to broadcast to.
        what: What has that shape, for the message: "the shape of the input".
    """
    if operand is None:
        return
    found, lead = operand.shape, len(shape) - operand.rank
    fits = lead >= 0 and all(
        a == 1 or a == b for a, b in zip(found, shape[max(lead, 0) :], strict=False)
    )
    if not fits:
        raise ShapeError(
            f"{name} has shape {list(found)}, which does not broadcast to {list(shape)}, {what}"
        )


def require_broadcast_together(*operands: Tensor) -> None:
    """Raise ShapeError unless operands broadcast together by NumPy's rules."""
    first = operands[0].shape
    for operand in operands:
        if operand.shape != first:
            break
    else:
        return  # equal shapes, the most frequent case
    for position in range(1, max(len(o.shape) for o in operands) + 1):
        size: Any = 1
        for operand in operands:
            if position > len(operand.shape):
                continue
            dim = operand.shape[-position]
            # A size that is not known may be 1, and contradicts nothing.
            if not is_known(dim) or dim == 1:
                continue
            if size != 1 and dim != size:
                shown = " and ".join(str(list(o.shape)) for o in operands)
                raise ShapeError(f"shapes {shown} do not broadcast together")
            size = dim


def require_same_dtype(*operands: Tensor) -> None:
    """Raise ShapeError unless all operands have one dtype."""
    first = operands[0].dtype
    for operand in operands:
        if operand.dtype != first:
            found = " and ".join(sorted({each.dtype for each in operands}))
            raise ShapeError(f"the operands must have one dtype, got {found}")


def require_single(name: str, operand: Tensor | None, *dtypes: str) -> None:
    """Raise ShapeError unless an operand is a scalar, has shape [1] or is omitted.

    Args:
        name: The operand's name in the standard.
        operand: The operand, None where it is omitted.
        *dtypes: Names of the allowed dtypes; none: all are allowed.
    """
    if operand is None:
        return
    if operand.rank > 1 or not all(dim == 1 for dim in operand.shape):
        raise ShapeError(f"{name} has shape {list(operand.shape)}; it must hold one number")
    if dtypes:
        require_dtype(name, operand, *dtypes)


def int_list(node: Node, name: str, operand: Tensor | None) -> list[int] | None:
    """Return whole numbers that old versions have as an attribute, new ones as an operand.

    Args:
        node: The node that may have the attribute.
        name: Name of the attribute and of the operand.
        operand: The operand, None where it is omitted.

    Returns:
        The numbers; [] if both are omitted, None if the operand's elements are not known.

    Raises:
        ShapeError: the operand is no list of whole numbers.
    """
    if operand is None:
        given = node.attrs.get(name)
        return [] if given is None else [int(number) for number in np.ravel(given)]
    if len(operand.shape) > 1:
        raise ShapeError(f"{name} has shape {list(operand.shape)}; it must be a list")
    require_dtype(name, operand, "int64", "int32")
    if operand.known is None:
        return None
    found: list[Any] = operand.known.reshape(-1).tolist()
    if operand.known.dtype.kind == "O":  # symbolic integers are instances of int, and stay
        found = [n if isinstance(n, int) else int(n) for n in found]
    return found


def require_within(name: str, operand: Tensor | None, least: int, most: int) -> None:
    """Raise ShapeError unless the elements of an operand, if known, are in [least, most].

    Elements that are computed at run time are checked by a step before the kernel that uses them.

    Args:
        name: The operand's name in the standard.
        operand: The operand, None where it is omitted.
        least: Smallest allowed element.
        most: Largest allowed element; a bound that is `ANY_SIZE` allows all.
    """
    known = None if operand is None else operand.known
    if known is None or not known.size:
        return
    if known.dtype.hasobject:  # symbolic numbers: these comparisons become guards
        numbers = [n for n in known.reshape(-1).tolist() if isinstance(n, int)]
        low, high = min(numbers, default=least), max(numbers, default=most)
    else:
        low, high = known.min().item(), known.max().item()
    if not (low >= least and high <= most):  # comparisons with ANY_SIZE are true
        wrong = high if low >= least else low
        raise ShapeError(f"{name} holds {wrong}, which is outside [{least}, {most}]")


def require_axis(node: Node, rank: int, default: int = 0) -> int:
    """Return the attribute ``axis`` counted from the front, in [0, rank).

    Args:
        node: The node with the attribute.
        rank: Rank of the input; a scalar counts as having one axis, as in the standard's tests.
        default: The axis if the attribute is omitted.

    Raises:
        ShapeError: there is no such axis.
    """
    axis = node.attrs.get("axis", default)
    rank = max(rank, 1)
    if not isinstance(axis, int) or not -rank <= axis < rank:
        raise ShapeError(f"axis is {axis}, outside [-{rank}, {rank}) of an input of rank {rank}")
    return axis % rank


def require_axes(rank: int, axes: Sequence[int]) -> list[int]:
    """Return distinct axes of an input of this rank, counted from the front, each in [0, rank).

    Raises:
        ShapeError: there is no such axis, or one is named twice.
    """
    found = [int(axis) for axis in axes]
    bound = max(rank, 1)
    wrong = [axis for axis in found if not -bound <= axis < bound]
    require(not wrong, "axes are {}; an input of rank {} has [-{}, {})", found, rank, bound, bound)
    found = [axis % bound for axis in found]
    require(len(set(found)) == len(found), "axes {} name one twice", found)
    return found


def require_whole_number(
    node: Node, name: str, default: int = 0, *, least: int | None = None, most: int | None = None
) -> int:
    """Return an attribute that is one whole number.

    Args:
        node: The node with the attribute.
        name: Name of the attribute.
        default: The number if the attribute is omitted.
        least: The smallest number that is allowed; None: any.
        most: The greatest number that is allowed; None: any.

    Raises:
        ShapeError: the attribute is no whole number, or outside these bounds.
    """
    number = node.attrs.get(name, default)
    if not isinstance(number, int):
        raise ShapeError(f"{name} is {number!r}, a whole number is needed")
    if least is not None and number < least:
        raise ShapeError(f"{name} is {number}; it must be at least {least}")
    if most is not None and number > most:
        raise ShapeError(f"{name} is {number}; it must be at most {most}")
    return number


def decoded(value: object, errors: str = "strict") -> str:
    """Return a string attribute, which is str or UTF-8 bytes, as str; errors as in bytes.decode."""
    return value.decode(errors=errors) if isinstance(value, bytes) else str(value)


def require_choice(node: Node, name: str, default: str, *allowed: str) -> str:
    """Return a string attribute that must be one of several words.

    Args:
        node: The node with the attribute.
        name: Name of the attribute.
        default: The word if the attribute is omitted.
        *allowed: The allowed words.

    Raises:
        ShapeError: the attribute is another word.
    """
    word = decoded(node.attrs.get(name, default), "replace")
    if word not in allowed:
        raise ShapeError(f"{name} is {word[:64]!r}; it must be one of {', '.join(allowed)}")
    return word


def require_choices(node: Node, name: str, allowed: Collection[str]) -> None:
    """Raise ShapeError unless each item of a list of strings is one of several words.

    Args:
        node: The node with the attribute.
        name: Name of the attribute; it may be omitted.
        allowed: The allowed words.
    """
    for item in node.attrs.get(name) or ():
        word = decoded(item, "replace")
        if word not in allowed:
            raise ShapeError(
                f"{name} has {word[:64]!r}; it must be one of {', '.join(sorted(allowed))}"
            )


def known_numbers(operand: Tensor | None) -> list[int] | None:
    """Return the elements of an operand as ints, None unless all are known whole numbers."""
    if operand is None or operand.known is None:
        return None
    found: list[object] = operand.known.reshape(-1).tolist()
    whole = [number for number in found if isinstance(number, int)]
    return whole if len(whole) == len(found) else None


def require_numbers(
    node: Node,
    name: str,
    count: int,
    default: int,
    least: int | None = None,
    most: int | None = None,
) -> list[int]:
    """Return an attribute that has one number for each of ``count`` dimensions.

    Args:
        node: The node with the attribute.
        name: Name of the attribute.
        count: How many numbers the attribute must have.
        default: Each of the numbers if the attribute is omitted or empty.
        least: The smallest number that is allowed; None: any.
        most: The greatest number that is allowed; None: any.

    Raises:
        ShapeError: the attribute has more or fewer numbers, or one is outside these bounds.
    """
    return checked_numbers(name, node.attrs.get(name), count, default, least, most)


def checked_numbers(
    name: str,
    given: Sequence[int] | None,
    count: int,
    default: int,
    least: int | None = None,
    most: int | None = None,
) -> list[int]:
    """Return the numbers of an attribute's value, checked like those of `require_numbers`.

    Args:
        name: Name for messages.
        given: The value; None or empty: omitted.
        count: How many numbers it must have.
        default: Each of the numbers if it is omitted.
        least: The smallest number that is allowed; None: any.
        most: The greatest number that is allowed; None: any.

    Raises:
        ShapeError: there are more or fewer numbers, or one is outside these bounds.
    """
    if given is None or len(given) == 0:
        return [default] * count
    found = [int(number) for number in given]
    if len(found) != count:
        raise ShapeError(f"{name} is {found}, {len(found)} numbers where {count} are needed")
    if least is not None and min(found) < least:
        raise ShapeError(f"{name} is {found}; each must be at least {least}")
    if most is not None and max(found) > most:
        raise ShapeError(f"{name} is {found}; each must be at most {most}")
    return found

"""Requirements: what an operator's operands and attributes must satisfy, declared once an operator.

A family's ``op.py`` names them in its declarations, as one function an operator:

    def gather_operands(node: Node, x: Tensor, indices: Tensor) -> None:
        axis = require_axis(node, x.rank)
        ...

    declare("Gather", requires=gather_operands, ...)

The function is called with the node and its operands in order, each a `Tensor`, or None where an
optional one is omitted. It raises `ShapeError` (by `require`) for what does not fit. It is called
when every operand's rank is known, so a size may be unknown, but no shape. An operand that it does
not look at has a name that begins with an underscore. One that is annotated as a `ValueType` (or
`Operand`) may be a sequence, an optional or a map, and comes as its type; else these are errors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import attrs
import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph.graph import Node
from subgraph.graph.types import Array


class _AnySize:
    """A size that is not known yet: every comparison with it holds, arithmetic keeps it unknown.

    So a requirement that is a conjunction of comparisons is decided by the sizes that are known.
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
    """Return whether a size of a `Tensor` is a number, so that decisions may be taken by it."""
    return size is not ANY_SIZE


@attrs.define(eq=False, slots=True)
class Tensor:
    """An operand as requirements see it; none of them changes it.

    Attributes:
        dtype: Name of the element type.
        shape: Sizes. One that is not known yet compares as equal to, and as smaller and greater
            than, every number: a requirement compares sizes and takes no other decision by them.
        known: The elements, where they are known: of a constant, or of a value at run time.
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
        """Number of elements; not known if a dimension is not."""
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
    """A requirement, with how many operands its function takes.

    Attributes:
        function: What raises ShapeError for operands that do not fit.
        needed: Positions of the operands that must be given.
        least: How many the function is called with at least; the others have defaults.
        most: How many may be given; None: any number.
        sequences: Whether the function takes operands that are no tensors.
        unused: Positions of the operands that the function does not look at.
    """

    function: Requirement
    needed: tuple[int, ...]
    least: int
    most: int | None
    sequences: bool
    unused: frozenset[int] = frozenset()

    def check(self, node: Node, operands: list[Any]) -> None:
        """Call the function, after what all operators require: as many tensors as there must be.

        Raises:
            ShapeError: the operands do not fit.
        """
        count = len(operands)
        fits = count >= self.least and (self.most is None or count <= self.most)
        if fits and _ONLY_TENSORS.issuperset(map(type, operands)):  # nearly all are
            self.function(node, *operands)
            return
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
        operands += [None] * (self.least - len(operands))
        self.function(node, *operands)


def made_rule(function: Requirement) -> Rule:
    """Return a requirement's function with the number of operands that its signature takes."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    least = [p for p in positional if p.default is p.empty]
    needed = [k for k, p in enumerate(least) if "None" not in str(p.annotation)]
    many = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    most = None if many else len(parameters)
    unused = frozenset(k for k, p in enumerate(positional) if p.name.startswith("_"))
    kinds = [str(p.annotation) for p in parameters if p.annotation is not p.empty]
    sequences = any("ValueType" in kind or "Operand" in kind for kind in kinds)
    return Rule(function, tuple(needed), len(least), most, sequences, unused)


def require(condition: bool, message: str, *values: object) -> None:
    """Raise ShapeError with ``message.format(*values)`` unless ``condition`` holds."""
    if not condition:
        raise ShapeError(message.format(*values))


def require_rank(name: str, operand: Tensor, *ranks: int) -> None:
    """Require that an operand has one of these ranks."""
    if operand.rank not in ranks:
        wanted = " or ".join(map(str, ranks))
        raise ShapeError(f"{name} has shape {list(operand.shape)}; it needs rank {wanted}")


def require_shape(name: str, operand: Tensor | None, shape: Sequence[int], why: str) -> None:
    """Require that an operand, where it is given, has this shape.

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
    """Require that an operand, where it is given, has one of these dtypes."""
    if operand is not None and operand.dtype not in dtypes:
        raise ShapeError(f"{name} is {operand.dtype}; it must be {' or '.join(dtypes)}")


def require_broadcast(name: str, operand: Tensor | None, shape: Sequence[int], what: str) -> None:
    """Require that an operand, where it is given, broadcasts to a shape as NumPy does.

    Args:
        name: The operand's name in the standard.
        operand: The operand, None where it is omitted.
        shape: The sizes that it must broadcast to.
        what: Whose shape that is.
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
    """Require that operands broadcast to one shape, as NumPy's do."""
    first = operands[0].shape
    for operand in operands:
        if operand.shape != first:
            break
    else:
        return  # nearly all are
    for position in range(1, max(len(o.shape) for o in operands) + 1):
        size: Any = 1
        for operand in operands:
            if position > len(operand.shape):
                continue
            dim = operand.shape[-position]
            if not is_known(dim) or dim == 1:
                continue
            if size != 1 and dim != size:
                shown = " and ".join(str(list(o.shape)) for o in operands)
                raise ShapeError(f"shapes {shown} do not broadcast together")
            size = dim


def require_same_dtype(*operands: Tensor) -> None:
    """Require that operands have one dtype."""
    first = operands[0].dtype
    for operand in operands:
        if operand.dtype != first:
            found = " and ".join(sorted({each.dtype for each in operands}))
            raise ShapeError(f"the operands must have one dtype, got {found}")


def require_single(name: str, operand: Tensor | None, *dtypes: str) -> None:
    """Require that an operand, where it is given, holds one number: a scalar, or shape [1].

    Args:
        name: The operand's name in the standard.
        operand: The operand, None where it is omitted.
        *dtypes: The dtypes that it may have; none: any.
    """
    if operand is None:
        return
    if operand.rank > 1 or not all(dim == 1 for dim in operand.shape):
        raise ShapeError(f"{name} has shape {list(operand.shape)}; it must hold one number")
    if dtypes:
        require_dtype(name, operand, *dtypes)


def listed(node: Node, name: str, operand: Tensor | None) -> list[int] | None:
    """Return whole numbers that are an attribute in old versions and an operand in new ones.

    Args:
        node: The node.
        name: The attribute's name, and the operand's.
        operand: The operand, None where it is omitted.

    Returns:
        The numbers, [] where they are left out, None while they are not known.

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
    if operand.known.dtype.kind == "O":  # traced numbers stay what they are
        found = [n if isinstance(n, int) else int(n) for n in found]
    return found


def require_within(name: str, operand: Tensor | None, least: int, most: int) -> None:
    """Require that the elements of an operand, as far as they are known, lie in [least, most].

    Elements that are computed at run time are checked by a step before the kernel that uses them.
    """
    known = None if operand is None else operand.known
    if known is None or not known.size or known.dtype.hasobject:
        return
    low, high = known.min().item(), known.max().item()
    if not (low >= least and high <= most):  # a bound that is not known holds for all
        wrong = high if low >= least else low
        raise ShapeError(f"{name} holds {wrong}, which is outside [{least}, {most}]")


def require_axis(node: Node, rank: int, default: int = 0, name: str = "axis") -> int:
    """Return the node's axis counted from the front, in [0, rank).

    A scalar counts as having one axis, as the standard's tests have it.

    Raises:
        ShapeError: there is no such axis.
    """
    axis = node.attrs.get(name, default)
    rank = max(rank, 1)
    if not isinstance(axis, int) or not -rank <= axis < rank:
        raise ShapeError(f"{name} is {axis}, outside [-{rank}, {rank}) of an input of rank {rank}")
    return axis % rank


def require_axes(rank: int, axes: Sequence[int]) -> list[int]:
    """Return axes counted from the front, each in [0, rank) and there once.

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


def whole_number(
    node: Node, name: str, default: int = 0, *, least: int | None = None, most: int | None = None
) -> int:
    """Return an attribute that is one whole number.

    Args:
        node: The node.
        name: The attribute.
        default: The number where it is left out.
        least: The smallest number that is allowed; None: any.
        most: The greatest number that is allowed; None: any.

    Raises:
        ShapeError: it is none, or outside these bounds.
    """
    number = node.attrs.get(name, default)
    if not isinstance(number, int):
        raise ShapeError(f"{name} is {number!r}, a whole number is needed")
    if least is not None and number < least:
        raise ShapeError(f"{name} is {number}; it must be at least {least}")
    if most is not None and number > most:
        raise ShapeError(f"{name} is {number}; it must be at most {most}")
    return number


def choice(node: Node, name: str, default: str, *allowed: str) -> str:
    """Return an attribute that is one of some words.

    Raises:
        ShapeError: it is another word.
    """
    given = node.attrs.get(name, default)
    word = given.decode(errors="replace") if isinstance(given, bytes) else str(given)
    if word not in allowed:
        raise ShapeError(f"{name} is {word[:64]!r}; it must be one of {', '.join(allowed)}")
    return word


def choices(node: Node, name: str, allowed: Collection[str]) -> None:
    """Require that each item of an attribute, which is a list of words, is one of some words.

    Raises:
        ShapeError: an item is another word.
    """
    for given in node.attrs.get(name) or ():
        word = given.decode(errors="replace") if isinstance(given, bytes) else str(given)
        if word not in allowed:
            raise ShapeError(
                f"{name} has {word[:64]!r}; it must be one of {', '.join(sorted(allowed))}"
            )


def known_numbers(operand: Tensor | None) -> list[int] | None:
    """Return the whole numbers that an operand holds, None where they are not all known."""
    if operand is None or operand.known is None:
        return None
    found: list[object] = operand.known.reshape(-1).tolist()
    whole = [number for number in found if isinstance(number, int)]
    return whole if len(whole) == len(found) else None


def numbers(
    node: Node,
    name: str,
    count: int,
    default: int,
    least: int | None = None,
    most: int | None = None,
) -> list[int]:
    """Return an attribute that has one number for each of ``count`` dimensions.

    Args:
        node: The node.
        name: The attribute.
        count: How many numbers there must be.
        default: Each number where the attribute is left out or empty.
        least: The smallest number that is allowed; None: any.
        most: The greatest number that is allowed; None: any.

    Raises:
        ShapeError: there is another count of numbers, or one is outside these bounds.
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
    """As `numbers`, of an attribute's value."""
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

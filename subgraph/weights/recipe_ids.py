"""Ids of recipes: texts that identify what a function computes, the same in every process.

A function counts by its name and line, and by what it holds: its closure, its defaults, arguments
of a `functools.partial`, the object of a bound method. Numbers and strings count as such. Any other
object counts by its class and by those of its attributes that the code reads and does not assign;
by all if it uses none, because it then passes the object on. Arrays, parameters and nodes count by
their class: a recipe gets arrays as parameters.
"""

from __future__ import annotations

import dis
import functools
import inspect
import weakref
from collections.abc import Callable
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import attrs
import numpy as np

from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.parameters import Parameter

_PLAIN = (int, float, complex, str, bytes, bool, type(None))
# Values that compare by content, and whose text has all of it.
_BY_TEXT = (range, slice, np.dtype, PurePath, Decimal, Fraction)
# Objects of a graph: a recipe gets arrays as parameters, and names differ between equal graphs.
_BY_CLASS = (np.ndarray, Parameter, Graph, Node, Value)
# How deep closures and attributes are followed; there is a bound since a function may be in its own
# closure.
_MOST_DEPTH = 3
_function_ids: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def recipe_id(recipe: str, make: Callable[..., Any]) -> str:
    """Return an id of a recipe's name and function that is the same in every process."""
    if not isinstance(make, FunctionType):  # an object may change between two calls
        return f"{recipe}|{_function_id(make)}"
    known = _function_ids.get(make)
    if known is None:
        # Computed once, so that a counter in the function's closure does not change the id.
        known = _function_ids[make] = _function_id(make)
    return f"{recipe}|{known}"


def _function_id(function: Any, depth: int = 0) -> str:
    held: list[Any] = []
    while isinstance(function, functools.partial):
        held += [*function.args, *function.keywords.items()]
        function = function.func
    if isinstance(function, MethodType):
        held.append(function.__self__)
        function = function.__func__
    elif issubclass(type(function), BuiltinFunctionType):
        owner: object = function.__self__  # of a function the module
        held += [] if owner is None or isinstance(owner, ModuleType) else [owner]
    elif not hasattr(function, "__qualname__"):  # an object with a __call__
        held.append(function)
        function = cast("Any", type(function)).__call__
    code: CodeType | None = getattr(function, "__code__", None)
    name = f"{getattr(function, '__module__', '')}.{function.__qualname__}"
    if code is None:
        return f"{name}|{[_plain(value, _NO_NAMES, depth) for value in held]!r}"
    names, assigned = _names(code)
    for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if variable not in assigned:
            held.append(cell.cell_contents)
    held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    parts = [_plain(value, names, depth) for value in held]
    return f"{name}:{code.co_firstlineno}|{parts!r}"


@attrs.frozen
class _Names:
    """The names of attributes in a code.

    Attributes:
        read: Those that it reads.
        assigned: Those that it assigns, of any object.
    """

    read: frozenset[str] = frozenset()
    assigned: frozenset[str] = frozenset()


_NO_NAMES = _Names()


@functools.lru_cache(maxsize=512)
def _names(code: CodeType) -> tuple[_Names, frozenset[str]]:
    """Return the names of attributes in a code, and the free variables that it assigns to."""
    found: dict[str, set[str]] = {}
    work = [code]
    while work:
        current = work.pop()
        for step in dis.get_instructions(current):
            found.setdefault(step.opname, set()).add(str(step.argval))
        work += [each for each in current.co_consts if isinstance(each, CodeType)]
    read = set[str]().union(*(found.get(name, ()) for name in ("LOAD_ATTR", "LOAD_METHOD")))
    names = _Names(frozenset(read), frozenset(found.get("STORE_ATTR", ())))
    return names, frozenset(found.get("STORE_DEREF", ()))


def _plain(value: Any, names: _Names, depth: int) -> Any:
    """Return a value whose text identifies what a function holds; see the first lines.

    Lists, sets and dicts count by what they hold if that is numbers and strings alone. Others may
    collect what the recipe makes, and count by their type.

    Args:
        value: The value.
        names: The attributes that the function uses.
        depth: Functions and objects around the value; below `_MOST_DEPTH` only names count.
    """
    item: Any = value  # without the type that each test below gives to `value`
    if type(item) in _PLAIN:  # the usual case
        return item
    if isinstance(value, tuple):
        return tuple(_plain(part, names, depth) for part in item)
    if isinstance(value, (list, set, frozenset, dict)) and item:
        parts: list[Any] = list(item.items() if isinstance(value, dict) else item)
        if all(map(_is_plain, parts)):
            texts = [repr(_plain(part, names, depth)) for part in parts]
            is_set = isinstance(value, (set, frozenset))
            return type(item).__name__, sorted(texts) if is_set else texts
    if isinstance(value, Enum):  # also one of a number's class
        return f"{_name_of(type(item))}.{item.name}"
    if isinstance(value, _PLAIN):
        return item
    if isinstance(value, np.generic):
        return item.dtype.str, item.item()
    if isinstance(value, _BY_TEXT):
        return _name_of(type(item)), repr(item)
    named = hasattr(item, "__qualname__")
    if depth < _MOST_DEPTH:
        if isinstance(value, (FunctionType, MethodType, BuiltinFunctionType, functools.partial)):
            return _function_id(item, depth + 1)
        if not named and not isinstance(value, _BY_CLASS):
            return _object(item, names, depth + 1)
    return _name_of(item if named else type(item))


def _object(value: Any, names: _Names, depth: int) -> Any:
    kind = cast("Any", type(value))
    own: dict[str, Any] = getattr(value, "__dict__", {})
    used = _with_methods(kind, names)
    slots = (name for name in used.read if inspect.ismemberdescriptor(_member(kind, name)))
    held = {**{name: getattr(value, name, None) for name in slots}, **own}
    if held.keys().isdisjoint(used.read | used.assigned):
        found = {name: item for name, item in own.items() if _is_plain(item)}
    else:
        found = {name: held[name] for name in held.keys() & (used.read - used.assigned)}
    return _name_of(kind), [(name, _plain(found[name], names, depth)) for name in sorted(found)]


@functools.lru_cache(maxsize=512)
def _with_methods(kind: type, names: _Names) -> _Names:
    """Return names with those in the methods and properties of a class that are among them."""
    read, assigned = set(names.read), set(names.assigned)
    work = list(read)
    while work:
        member: Any = _member(kind, work.pop())
        function = getattr(member, "fget", None) or getattr(member, "func", member)
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType):
            more = _names(code)[0]
            work += more.read - read
            read |= more.read
            assigned |= more.assigned
    return _Names(frozenset(read), frozenset(assigned))


def _member(kind: type, name: str) -> Any:
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def _name_of(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}.{thing.__qualname__}"


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number, a string, or a tuple of such."""
    if type(value) is tuple:
        return all(map(_is_plain, cast("tuple[Any, ...]", value)))
    return isinstance(value, (*_PLAIN, np.generic))

"""Value types: classes whose annotations are their fields, as attrs makes them, sooner.

attrs compiles five methods for each class when its module is imported: half of the time in which
a small model starts. Here only ``__init__`` is compiled, at a class's first use; the other methods
are the same functions for all classes. `attrs.fields`, `attrs.evolve` and the like take these
classes, and an attrs class may be a child of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from types import CellType, FunctionType, MemberDescriptorType
from typing import Any, NamedTuple, NoReturn, TypeVar, cast, dataclass_transform, overload

_C = TypeVar("_C", bound=type)
_R = TypeVar("_R")
_FIELDS = "__record_fields__"
_NONE: Mapping[str, Any] = {}
_COLLECTIONS: Mapping[type, Any] = {kind: kind for kind in (list, tuple, set, frozenset)}


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


MISSING: Any = _Missing()


class Field(NamedTuple):
    """A field of a class.

    Attributes:
        name: Its name.
        type: Its annotation, as text where annotations are not evaluated.
        default: What it is unless given; ``MISSING`` where there is none.
        factory: Makes the default for each object.
        converter: Turns what is given into what is held.
        metadata: What the declaration notes.
        kw_only: Whether it is only given by name.
    """

    name: str
    type: Any
    default: Any
    factory: Callable[[], Any] | None
    converter: Callable[[Any], Any] | None
    metadata: Mapping[str, Any]
    kw_only: bool


class FrozenError(AttributeError):
    """An object that does not change was to be changed."""


def field(
    *,
    default: Any = MISSING,
    factory: Callable[[], Any] | None = None,
    converter: Callable[[Any], Any] | None = None,
    metadata: Mapping[str, Any] = _NONE,
) -> Any:
    """Declare more of a field than its type and default; see `Field`."""
    return Field("", None, default, factory, converter, metadata, False)


@overload
def frozen(cls: _C, /) -> _C: ...
@overload
def frozen(*, eq: bool = True, kw_only: bool = False) -> Callable[[_C], _C]: ...
@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: Any = None, /, *, eq: bool = True, kw_only: bool = False) -> Any:
    """Make a class of fields that objects keep as they are made; equal ones are equal.

    Args:
        cls: The class.
        eq: Whether objects with equal fields are equal; False: only the same one is.
        kw_only: Whether fields are only given by name.
    """
    make = partial(_made, eq=eq, kw_only=kw_only, frozen=True)
    return make if cls is None else make(cls)


@overload
def define(cls: _C, /) -> _C: ...
@overload
def define(*, eq: bool = True, kw_only: bool = False) -> Callable[[_C], _C]: ...
@dataclass_transform(field_specifiers=(field,))
def define(cls: Any = None, /, *, eq: bool = True, kw_only: bool = False) -> Any:
    """Make a class of fields that may change; see `frozen`. Objects with ``eq`` have no hash."""
    make = partial(_made, eq=eq, kw_only=kw_only, frozen=False)
    return make if cls is None else make(cls)


def fields(cls: type) -> tuple[Field, ...]:
    """Return the fields of a class in the order in which they are given."""
    return cast("tuple[Field, ...]", getattr(cls, _FIELDS))


def names(cls: type) -> tuple[str, ...]:
    """Return the names of a class's fields."""
    return tuple(each.name for each in fields(cls))


def evolve(record: _R, **changes: Any) -> _R:
    """Return a new object like ``record``, with some fields changed."""
    kind: Any = type(record)
    for name in names(kind):
        if name not in changes:
            changes[name] = getattr(record, name)
    return cast(_R, kind(**changes))


def asdict(record: Any, *, recurse: bool = True) -> dict[str, Any]:
    """Return an object's fields by name; with ``recurse`` those of objects in it, too."""
    held = {name: getattr(record, name) for name in names(record.__class__)}
    return {name: _plain(value) for name, value in held.items()} if recurse else held


def astuple(record: Any) -> tuple[Any, ...]:
    """Return an object's fields in their order."""
    return tuple(getattr(record, name) for name in names(record.__class__))


def _plain(value: Any) -> Any:
    if hasattr(value, _FIELDS):
        return asdict(value)
    if value.__class__ is dict:
        return {_plain(key): _plain(item) for key, item in value.items()}
    made: Any = _COLLECTIONS.get(value.__class__)
    return value if made is None else made(map(_plain, value))


def _made(cls: Any, *, eq: bool, kw_only: bool, frozen: bool) -> Any:
    inherited: tuple[Field, ...] = getattr(cls, _FIELDS, ())
    own = _declared(cls, kw_only)
    mine = {each.name for each in own}
    every = (*(each for each in inherited if each.name not in mine), *own)
    _check_order(cls, every)
    names = tuple(each.name for each in every)
    content: dict[str, Any] = dict(cls.__dict__)
    for name in (*mine, "__dict__", "__weakref__"):
        content.pop(name, None)
    known = {each.name for each in inherited}
    slots = [name for name in names if name not in known]
    if not any("__weakref__" in vars(base) for base in cls.__mro__[1:-1]):
        slots.append("__weakref__")
    content.update(_methods(names, eq, frozen, content))
    content.update(
        {
            "__slots__": tuple(slots),
            "__qualname__": cls.__qualname__,
            "__match_args__": tuple(each.name for each in every if not each.kw_only),
            "__attrs_attrs__": _AttrsView(),
            "__signature__": _Signature(),
            _FIELDS: every,
        }
    )
    made = type(cls)(cls.__name__, cls.__bases__, content)
    _close_over(made, cls)
    return made


def _declared(cls: type, kw_only: bool) -> list[Field]:
    found: list[Field] = []
    for name, kind in vars(cls).get("__annotations__", {}).items():
        if str(kind).startswith(("ClassVar", "typing.ClassVar")):
            continue
        given = vars(cls).get(name, MISSING)
        if isinstance(given, MemberDescriptorType):
            given = MISSING
        made = given if isinstance(given, Field) else field(default=given)
        found.append(made._replace(name=name, type=kind, kw_only=kw_only))
    return found


def _check_order(cls: type, every: tuple[Field, ...]) -> None:
    optional = ""
    for each in every:
        if each.kw_only:
            continue
        if each.default is not MISSING or each.factory is not None:
            optional = each.name
        elif optional:
            raise TypeError(
                f"{cls.__qualname__}: field {each.name!r} has no default and stands after "
                f"{optional!r}, which has one"
            )


def _methods(
    names: tuple[str, ...], eq: bool, frozen: bool, own: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the methods of a class that it does not define itself."""
    made: dict[str, Any] = {
        "__init__": _first_init,
        "__repr__": _repr,
        "__getstate__": _get_state,
        "__setstate__": _set_state,
    }
    if frozen:
        made.update({"__setattr__": _refuse_set, "__delattr__": _refuse_delete})
    if eq and "__eq__" not in own:
        key = attrgetter(*names) if names else _nothing
        made.update({"__record_key__": staticmethod(key), "__eq__": _eq})
        made["__hash__"] = _hash if frozen else None
    return {name: method for name, method in made.items() if name not in own}


def _nothing(_: Any) -> tuple[()]:
    return ()


def _eq(self: Any, other: Any) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    return self.__record_key__(self) == self.__record_key__(other)


def _hash(self: Any) -> int:
    return hash(self.__record_key__(self))


def _repr(self: Any) -> str:
    held = ", ".join(f"{name}={getattr(self, name)!r}" for name in names(self.__class__))
    return f"{type(self).__qualname__.rpartition('>.')[2]}({held})"


def _refuse_set(self: Any, name: str, value: Any) -> NoReturn:
    raise FrozenError(f"{type(self).__qualname__} does not change: make another with {name!r}")


def _refuse_delete(self: Any, name: str) -> NoReturn:
    raise FrozenError(f"{type(self).__qualname__} does not change: {name!r} stays")


def _get_state(self: Any) -> dict[str, Any]:
    return asdict(self, recurse=False)


def _set_state(self: Any, state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        object.__setattr__(self, name, value)


def _first_init(self: Any, /, *args: Any, **kwargs: Any) -> None:
    """Make the class's own ``__init__``, and call it."""
    owner = next(base for base in type(self).__mro__ if vars(base).get("__init__") is _first_init)
    _ready(owner)(self, *args, **kwargs)


def _ready(cls: type) -> Callable[..., None]:
    """Return the ``__init__`` of a class, made at its first use."""
    found = vars(cls).get("__init__")
    if found is _first_init:
        found = _compiled_init(cls)
        setattr(cls, "__init__", found)  # noqa: B010
    return cast("Callable[..., None]", found)


def _compiled_init(cls: type) -> Callable[..., None]:
    space: dict[str, Any] = {"_MISSING": MISSING, "_set": object.__setattr__}
    positional: list[str] = []
    named: list[str] = []
    body: list[str] = []
    every = fields(cls)
    for k, each in enumerate(every):
        name, value = each.name, each.name
        parameter = name
        if each.factory is not None:
            space[f"_f{k}"] = each.factory
            parameter = f"{name}=_MISSING"
            value = f"(_f{k}() if {name} is _MISSING else {name})"
        elif each.default is not MISSING:
            space[f"_d{k}"] = each.default
            parameter = f"{name}=_d{k}"
        if each.converter is not None:
            space[f"_c{k}"] = each.converter
            value = f"_c{k}({value})"
        slot = getattr(cls, name, None)
        if isinstance(slot, MemberDescriptorType):
            space[f"_s{k}"] = slot.__set__
            body.append(f"  _s{k}(self, {value})")
        else:
            body.append(f"  _set(self, {name!r}, {value})")
        (named if each.kw_only else positional).append(parameter)
    if hasattr(cls, "__post_init__"):
        body.append("  self.__post_init__()")
    parameters = ", ".join(["self", *positional, *(["*", *named] if named else [])])
    exec("\n".join([f"def __init__({parameters}):", *(body or ["  pass"])]), space)
    made: Any = space["__init__"]
    made.__module__, made.__qualname__ = cls.__module__, f"{cls.__qualname__}.__init__"
    made.__annotations__ = {each.name: each.type for each in every} | {"return": None}
    return cast("Callable[..., None]", made)


def _close_over(made: type, cls: type) -> None:
    """Let methods that say ``super()`` mean the class with slots, which stands for the other."""
    for thing in vars(made).values():
        inner = getattr(thing, "__func__", getattr(thing, "fget", thing))
        cells: tuple[CellType, ...] = getattr(inner, "__closure__", None) or ()
        for cell in cells if isinstance(inner, FunctionType) else ():
            try:
                if cell.cell_contents is cls:
                    cell.cell_contents = made
            except ValueError:  # an empty cell
                continue


class _Signature:
    """What ``inspect.signature`` finds: the parameters of the ``__init__`` that will be made."""

    def __get__(self, instance: Any, owner: type) -> Any:
        from inspect import Parameter, signature

        if instance is not None:
            raise AttributeError("__signature__")
        for base in owner.__mro__:
            if vars(base).get("__init__") is _first_init:
                _ready(base)
        found = signature(getattr(owner, "__init__"))  # noqa: B009
        first, *others = found.parameters.values()
        assert first.kind is not Parameter.KEYWORD_ONLY, "it is the object"
        return found.replace(parameters=others)


class _AttrsView:
    """What attrs finds: its own description of the fields, made when it is asked for."""

    def __get__(self, instance: Any, owner: type) -> Any:
        import attrs

        described = {
            each.name: attrs.field(
                default=attrs.NOTHING
                if each.default is MISSING and each.factory is None
                else each.default
                if each.factory is None
                else attrs.Factory(each.factory),
                converter=each.converter,
                metadata=dict(each.metadata),
                type=each.type,
                kw_only=each.kw_only,
            )
            for each in fields(owner)
        }
        return attrs.fields(attrs.make_class(owner.__name__, described))

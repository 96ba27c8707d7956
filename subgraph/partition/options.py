"""Options of a partition: how regions grow, how many and how large, names forced in or out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
from attrs.validators import optional

from subgraph.errors import PartitionError
from subgraph.graph.graph import Graph
from subgraph.system.registry import nearest

STRATEGIES = ("selector", "hetero")  # functions of `proposal` implement them


def _names(values: Iterable[str] | str | None) -> frozenset[str]:
    # A single string is one name, not a list of its characters.
    names: Any = () if values is None else [values] if isinstance(values, str) else values
    try:
        held: list[Any] = list(names)
    except TypeError:
        held = [names]
    if not all(isinstance(name, str) for name in held):
        raise PartitionError(f"include and exclude take names of nodes, got {values!r}")
    return frozenset(held)


def _is_strategy(_: Any, __: Any, value: Any) -> None:
    if value not in STRATEGIES:
        raise PartitionError(f"strategy {value!r} is unknown; {nearest(str(value), STRATEGIES)}")


def _is_number(least: int) -> Callable[[Any, Any, Any], None]:
    """Return the validator of a field that is a whole number of at least ``least``."""

    def check(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
        if not isinstance(value, int) or value < least:
            raise PartitionError(
                f"{field.name} takes a whole number of at least {least}, got {value!r}"
            )

    return check


@attrs.frozen
class Choices:
    """How regions of one property grow, how large and how many they are; see `Options`."""

    strategy: str = attrs.field(validator=_is_strategy)
    min_size: int = attrs.field(validator=_is_number(1))
    max_subgraphs: int | None = attrs.field(validator=optional(_is_number(0)))


@attrs.frozen(kw_only=True)
class Options:
    """The options of the pass; None leaves the choice to each property.

    Attributes:
        strategy: "selector" (MXNet's order of growth) or "hetero" (OpenVINO's).
        min_size: Regions of fewer nodes are not replaced.
        max_subgraphs: At most so many regions of each property, the largest, are replaced.
        include: Names of nodes that join regions although the selector is not asked.
        exclude: Names of nodes that stay outside of regions.
        more: Options of the properties themselves.
    """

    strategy: str | None = attrs.field(default=None, validator=optional(_is_strategy))
    min_size: int | None = attrs.field(default=None, validator=optional(_is_number(1)))
    max_subgraphs: int | None = attrs.field(default=None, validator=optional(_is_number(0)))
    include: frozenset[str] = attrs.field(converter=_names, default=None)
    exclude: frozenset[str] = attrs.field(converter=_names, default=None)
    more: Mapping[str, Any] = attrs.field(factory=dict[str, Any])

    def __attrs_post_init__(self) -> None:
        both = sorted(self.include & self.exclude)
        if both:
            raise PartitionError(f"node {both[0]!r} is both in include and in exclude")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Options:
        """Return the options from the result of `as_dict`.

        Raises:
            PartitionError: one does not fit.
        """
        more = {name: value for name, value in values.items() if name not in OWN}
        return cls(more=more, **{name: values[name] for name in OWN if name in values})

    def as_dict(self) -> dict[str, Any]:
        """Return all options by name, for ``pre_partition``."""
        own = {name: getattr(self, name) for name in OWN}
        # 0 is a value of max_subgraphs; None and an empty set leave the choice to the property.
        own = {name: value for name, value in own.items() if value not in (None, frozenset())}
        return {**own, **self.more}


OWN = tuple(field.name for field in attrs.fields(Options) if field.name != "more")


def check_names(graph: Graph, options: Options) -> None:
    """Check that ``include`` and ``exclude`` name nodes of the graph, its bodies or its regions.

    Raises:
        PartitionError: a name is not; the message lists similar names.
    """
    wanted = options.include | options.exclude
    if not wanted:
        return
    known = {node.name for inner in graph.levels(regions=True) for node in inner.nodes}
    for name in sorted(wanted - known):
        raise PartitionError(
            f"include or exclude names {name!r}, but graph {graph.name!r} has no such node; "
            f"{nearest(name, known)}"
        )

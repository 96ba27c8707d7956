"""Properties: how an accelerator finds regions, and the subgraph nodes that replace them.

A `SubgraphProperty` makes the selectors and the subgraph nodes. ``graph.attrs
["subgraph_property"]`` holds one, or a list in order of priority, for the pass PartitionGraph;
`optimize_for` applies one by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar, overload

from subgraph.errors import DeviceError, PartitionError, described, require_type
from subgraph.graph.graph import Graph, Node
from subgraph.operators.subgraph_op import subgraph_node
from subgraph.partition.selector import (
    SELECTORS,
    ContainOpSelector,
    Reject,
    SelectorFactory,
    SubgraphSelector,
    first_line,
)
from subgraph.system.registry import Registry, defined_at, nearest


class SubgraphProperty:
    """Base of properties: finds regions and makes the nodes that replace them.

    An option of the pass overrides ``strategy``, ``min_size`` and ``max_subgraphs``.

    Attributes:
        name: Name in messages, records and default node names; "": the registered name, or else
            that of the class.
        strategy: Order of growth, "selector" or "hetero".
        min_size: Regions of fewer nodes are not replaced.
        max_subgraphs: At most so many regions, the largest, are replaced; None: all.
        constant_weights: Whether constants (Constant nodes, and nodes that depend only on these or
            on shapes) reach a region's op as Parameters. Selectors then see the Parameters, and are
            not asked about these nodes.
        version: Version of the property's ops, saved in files; loading reports a different one.
        options: Names of the property's own options, for ``pre_partition``; set in the class. Other
            options are refused. None: every option is passed to ``pre_partition``.
    """

    name: str = ""
    constant_weights: bool = True
    version: str = ""
    strategy: str = "selector"
    min_size: int = 1
    max_subgraphs: int | None = None
    options: ClassVar[Sequence[str] | None] = None

    def create_subgraph_selector(self) -> SubgraphSelector:
        """Return a fresh selector; called for every node at which a region may start."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say how regions are found: write "
            "create_subgraph_selector"
        )

    def create_subgraph_node(self, subgraph: Graph, subgraph_id: int) -> Node | Reject | None:
        """Return the node that replaces a region, or None or a Reject to refuse the region.

        The default node, of op ``_subgraph_op``, runs the inner graph with the default executor.

        Args:
            subgraph: The region. Its inputs have types; a weight has its parameter.
            subgraph_id: Number of the region, unique in the pass.
        """
        return subgraph_node(subgraph, name=f"{property_name(self)}_{subgraph_id}")

    def pre_partition(self, graph: Graph, options: Mapping[str, Any]) -> Graph | None:
        """Look at the graph before it is cut, or raise to refuse it.

        Also called when a saved partition is loaded, before `create_subgraph_node` makes its ops
        again: with the unpartitioned graph and the saved options.

        Args:
            graph: The graph to partition; it must not be changed.
            options: All options of the pass, the property's own among them.

        Returns:
            None, or another graph to partition instead.
        """
        return None

    def post_partition(self, graph: Graph) -> Graph | None:
        """Look at the partitioned graph; return None, or another graph to continue with."""
        return None

    def saved_options(self) -> Mapping[str, Any]:
        """Return the property's own state for saved partitions, by name: values like options.

        Loading makes the property by its registered name, without arguments, and passes this state
        to ``pre_partition`` among the options.
        """
        return {}


class SelectorProperty(SubgraphProperty):
    """The default property around a selector that stands alone."""

    def __init__(self, selector: SelectorFactory | SubgraphSelector, name: str = "") -> None:
        """Take the selector's class or function; an instance is copied for every start node."""
        self.selector = selector
        if isinstance(selector, SubgraphSelector):
            self.name = name or type(selector).__name__
        else:
            self.name = name or getattr(selector, "__name__", type(selector).__name__)

    def create_subgraph_selector(self) -> SubgraphSelector:
        """Return a fresh selector."""
        if not isinstance(self.selector, SubgraphSelector):
            return self.selector()
        if isinstance(self.selector, ContainOpSelector):
            return self.selector  # it has no state
        # The user's object stays as it is; `reset` gives the shallow copy a state of its own.
        fresh = copy.copy(self.selector)
        fresh.reset()
        return fresh


PropertyFactory = Callable[[], SubgraphProperty]
_P = TypeVar("_P", bound=PropertyFactory)


def _discover() -> None:
    from importlib.metadata import entry_points

    from subgraph.system.registry import Files

    # Pattern properties stand beside the passes, those of other libraries beside their devices.
    Files("subgraph.passes", lambda _: True).load_all()
    Files("subgraph.devices.backends", lambda name: name.endswith(".property")).load_all()
    for entry in entry_points(group="subgraph.properties"):
        try:
            factory: Any = entry.load()
            PROPERTIES.register(entry.name, factory, f"entry point {entry.value}")
            _names.setdefault(factory, entry.name)
        except Exception as error:
            raise PartitionError(
                f"property {entry.name!r} (entry point {entry.value}) cannot be loaded: {error}; "
                "repair or uninstall the package that declares it"
            ) from error


PROPERTIES: Registry[PropertyFactory] = Registry("property", PartitionError, _discover)
_names: dict[Any, str] = {}


@overload
def register_property(name: str) -> Callable[[_P], _P]: ...
@overload
def register_property(name: str, cls: _P) -> _P: ...
def register_property(name: str, cls: PropertyFactory | None = None) -> Any:
    """Give a property class (or a function that makes a property) a name.

    With the class left out, returns a decorator.

    Raises:
        PartitionError: another property has the name, or ``cls`` cannot be called.
    """
    if cls is None:
        # ``@register_property`` without parentheses passes the decorated class as the name.
        require_type(name, str, PartitionError, 'the name first: @register_property("my_property")')
        return partial(register_property, name)
    if not callable(cls):
        raise PartitionError(
            f"property {name!r}: {cls!r} makes no properties; give the class, or a function that "
            "returns one"
        )
    PROPERTIES.register(name, cls, defined_at(cls))
    _names[cls] = name
    return cls


def list_properties() -> dict[str, str]:
    """Return the registered properties, those of installed packages too.

    Returns:
        The first line of each one's docstring, by the name for `optimize_for`.
    """
    return {name: first_line(PROPERTIES.get(name)) for name in sorted(PROPERTIES.names())}


def property_name(owner: SubgraphProperty) -> str:
    """Return the name of a property for messages, records and node names."""
    return owner.name or _names.get(type(owner)) or type(owner).__name__


def saved_name(owner: SubgraphProperty) -> str:
    """Return the name of a property in files: a registered one if there is one."""
    names = [name for name in (owner.name, _names.get(type(owner), "")) if name]
    registered = (name for name in names if PROPERTIES.find(name, named_only=True) is not None)
    return next(registered, property_name(owner))


def property_from(source: Any) -> SubgraphProperty:
    """Return the property for a property, a selector, a class of these, or a registered name.

    Raises:
        PartitionError: ``source`` is none of these, or its class cannot be called.
        DeviceError: the property's device cannot start.
    """
    if isinstance(source, SubgraphProperty):
        return source
    if isinstance(source, SubgraphSelector):
        return SelectorProperty(source)
    if isinstance(source, str):
        return _by_name(source)
    if isinstance(source, type):
        if issubclass(source, SubgraphProperty):
            return _made(source, source.__name__)
        if issubclass(source, SubgraphSelector):
            return SelectorProperty(source)
    raise PartitionError(
        f"{source!r} is no property: give a SubgraphProperty, a SubgraphSelector, a class of "
        "these, or a name that was registered"
    )


def _made(factory: PropertyFactory, name: str) -> SubgraphProperty:
    try:
        made: Any = factory()
    except DeviceError:  # says what to install
        raise
    except Exception as error:
        raise PartitionError(
            f"property {name!r}: {defined_at(factory)} raised {described(error)}; "
            "what takes arguments is passed as an object, not by its class or name"
        ) from error
    if not isinstance(made, SubgraphProperty):
        raise PartitionError(
            f"property {name!r}: {defined_at(factory)} made {made!r}, which is no SubgraphProperty"
        )
    return made


def _by_name(name: str) -> SubgraphProperty:
    factory = PROPERTIES.find(name)
    selector = SELECTORS.find(name)
    if factory is not None and selector is not None:
        raise PartitionError(
            f"{name!r} is a property ({defined_at(factory)}) and a selector "
            f"({defined_at(selector)}); rename one, or give the object instead of the name"
        )
    if factory is not None:
        made = _made(factory, name)
        # The name is registered for the function that makes the property; `property_name` knows the
        # class only.
        if not made.name and type(made) is not factory:
            made.name = name
        return made
    if selector is not None:
        return SelectorProperty(selector, name)
    known = [*PROPERTIES.names(), *SELECTORS.names()]
    raise PartitionError(f"no property or selector named {name!r}; {nearest(name, known)}")


def properties_from(source: Any) -> list[SubgraphProperty]:
    """Return the properties for one item or a list of items; see `property_from`."""
    if isinstance(source, (list, tuple)):
        items: list[Any] = list(source)  # pyright: ignore[reportUnknownArgumentType]
        return [property_from(item) for item in items]
    return [property_from(source)]


def optimize_for(graph: Graph, name: Any, **options: Any) -> Graph:
    """Partition ``graph`` for an accelerator and return the new graph.

    Args:
        graph: The graph; it is not changed.
        name: The registered name of a property or selector, such an object, or a list of these.
        **options: Options of the pass PartitionGraph (strategy, min_size, max_subgraphs, include,
            exclude); others are passed to the property's ``pre_partition``.

    Raises:
        PartitionError: the name is unknown, an option does not fit, or a selector or property
            raised or answered with an unexpected type.
        DeviceError: the property's device cannot start; the message says what to install.
    """
    from subgraph.transform.pass_manager import apply_pass

    return apply_pass(graph, "PartitionGraph", properties=name, **options)

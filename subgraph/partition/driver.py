"""The whole partition: propose, prune and replace, for each property and body, with a record."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from subgraph.errors import PartitionError, SubgraphError, described
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.parameters import Parameter
from subgraph.partition.constants import ConstantWeights, replace_by_weights
from subgraph.partition.op_names import OperatorNames
from subgraph.partition.op_note import note_op, saved_options
from subgraph.partition.options import OWN, Choices, Options, check_names
from subgraph.partition.property import SubgraphProperty, property_name
from subgraph.partition.proposal import Proposal, Proposals, propose, prune
from subgraph.partition.record import (
    KEY,
    MADE,
    REFUSED,
    UNUSED,
    PartitionRecord,
    RegionNote,
    Run,
    record_of,
)
from subgraph.partition.replace import Cutter, Replacement, create_node
from subgraph.partition.search.workspace import Workspace
from subgraph.partition.selector import Reject
from subgraph.partition.selector_driver import SelectorDriver
from subgraph.system.gc_control import paused_gc
from subgraph.system.registry import nearest


def partition(
    graph: Graph, properties: Sequence[SubgraphProperty], options: Options | None = None
) -> Graph:
    """Partition ``graph`` by each property in order and return the new graph.

    Args:
        graph: The graph; it is not changed.
        properties: Properties in order of priority.
        options: Options of the pass; None: the defaults.

    Raises:
        PartitionError: an option does not fit, or a selector or property raised or answered with an
            unexpected type.
    """
    options = options or Options()
    check_names(graph, options)
    with paused_gc():
        return _partition(graph, properties, options)


def _partition(graph: Graph, properties: Sequence[SubgraphProperty], options: Options) -> Graph:
    shared = _Shared(graph)
    known = len(shared.parameters)
    current = _Target(graph, is_copy=False)
    # Number of regions after the last cut of each property that left proposals unreplaced.
    left: dict[int, int] = {}
    is_first = True
    # Later regions limit how an earlier property's regions grow, so that it may accept one now that
    # replaces a larger one, which it refused. It is asked until the pass would change nothing more.
    while is_first or any(regions != shared.made for regions in left.values()):
        for position, owner in enumerate(properties):
            if is_first:
                _check_options(owner, options)
                replaced = call_hook(owner, "pre_partition", current.graph, options)
                if replaced is not None:
                    current = _Target(replaced, is_copy=False)
                shared.names = OperatorNames(current.graph)
            elif left.get(position, shared.made) == shared.made:
                continue
            before, shared.has_left = shared.made, False
            current.cut(owner, options, shared)
            _cut_bodies(current, owner, options, shared)
            if shared.has_left:
                left[position] = shared.made
            else:
                left.pop(position, None)
            if is_first or shared.made > before:
                replaced = call_hook(owner, "post_partition", current.graph, options)
                if replaced is not None:
                    current = _Target(replaced, is_copy=False)
        is_first = False
    if len(shared.parameters) > known:  # bodies have some that the graphs around do not list yet
        for level in reversed(current.graph.levels()):
            level.refresh_parameters()
    return current.graph


def _check_options(owner: SubgraphProperty, options: Options) -> None:
    """Check the property's texts, and that it takes the options that are not the pass's own.

    Raises:
        PartitionError: a text is none, or the property does not take an option.
    """
    # Files hold these texts: another value would make the record in a file unreadable.
    for attribute in ("name", "version"):
        held: Any = getattr(owner, attribute)
        if not isinstance(held, str):
            raise PartitionError(
                f"property {type(owner).__name__!r}: its {attribute} is {held!r}; set it to a text"
            )
    declared = type(owner).options
    if isinstance(declared, str):
        raise PartitionError(
            f"property {property_name(owner)!r}: its options are {declared!r}; set a tuple of "
            f"names: options = ({declared!r},)"
        )
    takes_more = type(owner).pre_partition is not SubgraphProperty.pre_partition
    if declared is None and takes_more:
        return
    own = declared or ()
    for name in options.more:
        if name not in own:
            why = (
                "which declares its options"
                if declared is not None
                else "which takes none of its own (it has no pre_partition)"
            )
            raise PartitionError(
                f"no option {name!r} of PartitionGraph, nor of property {property_name(owner)!r}, "
                f"{why}; {nearest(name, [*OWN, *own])}"
            )


def call_hook(owner: SubgraphProperty, method: str, graph: Graph, options: Options) -> Graph | None:
    """Call a property's hook and return the graph that it returns, None if it returns none.

    Args:
        owner: The property.
        method: "pre_partition" or "post_partition".
        graph: The graph that the hook is called with.
        options: Options of the pass, for ``pre_partition``.

    Raises:
        PartitionError: the hook raised, refused the graph, or changed its inputs or outputs.
    """
    before = _ports(graph)
    try:
        if method == "pre_partition":
            answer: Any = owner.pre_partition(graph, options.as_dict())
        else:
            answer = owner.post_partition(graph)
    except SubgraphError as error:
        error.add_note(f"in {method} of property {property_name(owner)!r}")
        raise
    except Exception as error:
        raise PartitionError(
            f"property {property_name(owner)!r}: {method} raised {described(error)}"
        ) from error
    if isinstance(answer, Reject):
        raise PartitionError(
            f"property {property_name(owner)!r}: {method} refused graph {graph.name!r}: "
            f"{answer.reason} ({answer.where})"
        )
    after = answer if isinstance(answer, Graph) else graph
    if _ports(after) != before:
        raise PartitionError(
            f"property {property_name(owner)!r}: {method} changed the inputs and outputs of graph "
            f"{graph.name!r} from {before} to {_ports(after)}; leave them as they are"
        )
    return answer if isinstance(answer, Graph) else None


def _ports(graph: Graph) -> tuple[list[str], list[str]]:
    """Return the names of a graph's inputs and of its outputs."""
    return [value.name for value in graph.inputs], [value.name for value in graph.outputs]


def _cut_bodies(top: _Target, owner: SubgraphProperty, options: Options, shared: _Shared) -> None:
    """Cut the bodies of nodes outside of regions; the graph of ``top`` is the pass's own copy."""
    levels = [top]
    for target in levels:
        holders = [n for n in target.graph.nodes if n.attrs and n.subgraph is None and n.bodies]
        weights = target.weights() if holders and owner.constant_weights else {}
        for node in holders:
            captured = iter(node.captures)
            for key, body in node.attrs.items():
                if isinstance(body, Graph):
                    pairs = list(zip(body.captures, captured, strict=False))
                    outside = {v: weights[outer] for v, outer in pairs if outer in weights}
                    inner = _Target(body, is_copy=True, outside=outside)
                    inner.cut(owner, options, shared)
                    node.attrs[key] = inner.graph
                    levels.append(inner)
    taken = {parameter for target in levels for parameter in target.taken_outside}
    if taken:
        for target in levels:
            target.replace_constants(taken)
            target.replace_captures(taken)


class _Shared:
    """State that the graph and its bodies share.

    Attributes:
        next: Number of the next region.
        made: Number of regions that were made.
        has_left: Whether a property that cuts left proposals unreplaced, or filtered out nodes.
        parameters: Names of all parameters.
        names: Checks the operator names of selectors.
    """

    def __init__(self, graph: Graph) -> None:
        self.next = 0
        self.made = 0
        self.has_left = False
        self.parameters = set(graph.parameters)
        self.names = OperatorNames(graph)


class _Target:
    """A graph, or body, that properties cut one after the other.

    Attributes:
        graph: The graph as it is now.
        work: Its nodes by number; the numbers stay the same for all properties.
        made: Members of the regions that were replaced.
        taken_outside: Parameters of constant captures that regions use.
    """

    def __init__(
        self, graph: Graph, *, is_copy: bool, outside: Mapping[Value, Parameter] | None = None
    ) -> None:
        """Begin without regions.

        Args:
            graph: The graph.
            is_copy: Whether the graph may be changed.
            outside: For a body, the Parameters of captures that are constant.
        """
        self.graph = graph
        self.work = Workspace.of(graph)
        self.made: list[list[int]] = []
        self.taken_outside: set[Parameter] = set()
        self._is_copy = is_copy
        self._outside = outside or {}
        self._constants: ConstantWeights | None = None
        self._shown = False

    def cut(self, owner: SubgraphProperty, options: Options, shared: _Shared) -> None:
        """Cut by one property, in rounds until none replaces a region."""
        mark_forced(self.work, options)
        self._prepare_constants(owner, options, shared)
        earlier = record_of(self.graph.attrs.get(KEY))
        choices = _choices(owner, options)
        cap = choices.max_subgraphs
        if cap is not None:
            present = {node.name for node in self.graph.nodes if node.subgraph is not None}
            cap = max(cap - len(present & earlier.made_by(property_name(owner))), 0)
        refused: dict[tuple[int, ...], Reject] = {}
        runs: list[Run] = []
        while True:
            run, again = self._round(owner, options, choices, cap, refused, shared)
            runs.append(run)
            if not again:
                break
            if cap is not None:
                cap -= sum(note.status == MADE for note in run.regions)
        if not self._is_copy:
            self._replace(Replacement(self.graph), set())
        if self._constants is not None and self._shown:
            self._constants.hide(self.graph, self.work.nodes)
            self._shown = False
        self.graph.attrs[KEY] = PartitionRecord((*earlier.runs, *runs))

    def _prepare_constants(
        self, owner: SubgraphProperty, options: Options, shared: _Shared
    ) -> None:
        """Attach Parameters to constants, if the property sees them as weights."""
        if self._constants is None and owner.constant_weights:
            skip = options.include | options.exclude
            self._constants = ConstantWeights(
                self.graph, self.work.nodes, skip, shared.parameters, self._outside
            )
            if self._constants and not self._is_copy:
                self._replace(Replacement(self.graph), set())
        if self._constants is None:
            return
        self._constants.keep(self.graph, self.work.nodes)
        for number in self._constants.numbers:
            self.work.free[number] = not owner.constant_weights
        if owner.constant_weights:
            self._constants.show(self.graph, self.work.nodes)
        self._shown = owner.constant_weights

    def weights(self) -> dict[Value, Parameter]:
        """Return the weights of bodies: Parameters by values, of constants and of captures."""
        found = self._captured_parameters()
        if self._constants is not None:
            found.update(self._constants.values(self.graph, self.work.nodes))
        return found

    def replace_constants(self, taken: AbstractSet[Parameter | None]) -> None:
        """Replace the graph's own constants whose Parameters are ``taken``, in its bodies too."""
        if self._constants is not None:
            found = self._constants.take(taken, self.graph, self.work.nodes)
            replace_by_weights(self.graph, found)

    def replace_captures(self, taken: AbstractSet[Parameter]) -> None:
        """Give bodies values of their own for captures whose Parameters are ``taken``."""
        captured = self._captured_parameters()
        replace_by_weights(self.graph, {v: p for v, p in captured.items() if p in taken})

    def _captured_parameters(self) -> dict[Value, Parameter]:
        """Return the parameters of the graph that bodies capture, by their values."""
        inputs = set(self.graph.inputs)
        values = dict.fromkeys(value for node in self.graph.nodes for value in node.captures)
        return {v: v.parameter for v in values if v.parameter is not None and v not in inputs}

    def _round(
        self,
        owner: SubgraphProperty,
        options: Options,
        choices: Choices,
        cap: int | None,
        refused: dict[tuple[int, ...], Reject],
        shared: _Shared,
    ) -> tuple[Run, bool]:
        driver = SelectorDriver(self.work, owner, shared.names)
        found = propose(driver, self.made, choices.strategy)
        statuses = prune(found.regions, choices.min_size, cap, self.work.forced)
        notes, made = self._make(owner, found.regions, statuses, refused, shared, options)
        for note, region, node in zip(notes, found.regions, made, strict=True):
            if node is not None:
                note.node = node.name
                self.made.append(region.members)
            else:
                for member in region.members:
                    self.work.free[member] = 1
        run = _run(owner, options, choices, driver, found, notes)
        # The nodes of refused, small or filtered regions might form regions now. Another round
        # finds them, so that the pass changes nothing when it is applied again.
        has_left = not all(made) or bool(found.filtered)
        shared.made += sum(node is not None for node in made)
        shared.has_left |= has_left
        return run, any(made) and has_left

    def _make(
        self,
        owner: SubgraphProperty,
        regions: Sequence[Proposal],
        statuses: Sequence[str],
        refused: dict[tuple[int, ...], Reject],
        shared: _Shared,
        options: Options,
    ) -> tuple[list[RegionNote], list[Node | None]]:
        cutter, replacement = Cutter(self.graph), Replacement(self.graph)
        weights: set[Parameter | None] = set()
        nodes, name, has_constants = self.work.nodes, property_name(owner), self._shown
        notes: list[RegionNote] = []
        made: list[Node | None] = []
        for region, status in zip(regions, statuses, strict=True):
            node = why = None
            if status == MADE:
                members = list(map(nodes.__getitem__, region.members))
                if refused and (why := refused.get(tuple(region.members))) is not None:
                    status = REFUSED
                elif (piece := cutter.cut_out(members, f"{name}_{shared.next}")) is None:
                    status = UNUSED
                elif isinstance(answer := create_node(owner, piece, shared.next), Reject):
                    status, why = REFUSED, answer
                    refused[tuple(region.members)] = answer
                    shared.next += 1
                else:
                    node = answer
                    note_op(node, owner, shared.next, options)
                    replacement.add(members, piece, node)
                    if has_constants:
                        weights.update(value.parameter for value in piece.inputs)
                    shared.next += 1
            notes.append(RegionNote(region.start, len(region.members), status, "", why))
            made.append(node)
        if any(made):
            self._replace(replacement, weights)
        return notes, made

    def _replace(self, replacement: Replacement, weights: AbstractSet[Parameter | None]) -> None:
        """Continue with the graph that ``replacement`` makes.

        Args:
            replacement: The regions with their nodes.
            weights: Parameters that these regions use.
        """
        self.graph, copies = replacement.finish()
        self._is_copy = True
        nodes = self.work.nodes
        nodes[:] = map(copies.get, nodes, nodes)  # constants that became weights have no copy
        if self._constants is not None and self._shown:
            self.taken_outside.update(p for p in self._outside.values() if p in weights)
            self.replace_constants(weights)
            self._constants.show(self.graph, nodes)


def _choices(owner: SubgraphProperty, options: Options) -> Choices:
    """Return the options, and the property's attributes for those that leave the choice to it.

    Raises:
        PartitionError: an attribute does not fit.
    """

    def chosen(name: str) -> Any:
        value = getattr(options, name)
        return getattr(owner, name) if value is None else value

    try:
        return Choices(chosen("strategy"), chosen("min_size"), chosen("max_subgraphs"))
    except PartitionError as error:
        error.add_note(f"for property {property_name(owner)!r}")
        raise


def mark_forced(work: Workspace, options: Options) -> None:
    """Mark the nodes that ``include`` forces into regions; those of ``exclude`` are not free."""
    if options.include or options.exclude:
        for number, name in enumerate(work.names):
            if name in options.include:
                work.forced[number] = 1
            elif name in options.exclude:
                work.free[number] = 0


def _run(
    owner: SubgraphProperty,
    options: Options,
    choices: Choices,
    driver: SelectorDriver,
    found: Proposals,
    notes: list[RegionNote],
) -> Run:
    names = driver.work.names
    region = [-1] * len(names)
    for number, proposal in enumerate(found.regions):
        for member in proposal.members:
            region[member] = number
    forced = dict.fromkeys(options.include, "included")
    forced.update((name, "excluded") for name in options.exclude)
    return Run(
        property=property_name(owner),
        selector=found.selector,
        strategy=choices.strategy,
        min_size=choices.min_size,
        max_subgraphs=choices.max_subgraphs,
        names=names,
        via=found.via,
        region=array("i", region),
        given_up=found.given_up,
        filtered=found.filtered,
        dropped=driver.dropped,
        refusals=driver.refusals,
        regions=notes,
        forced=forced,
        version=owner.version,
        options=saved_options(owner, options)[0],
    )

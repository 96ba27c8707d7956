"""Plans: a graph for concrete input shapes, as steps over placed memory; made once, run often.

`make_plan` walks the graph once. Types become concrete, and values that depend only on shapes,
small weights and known inputs are computed. Nodes whose inputs are weights become weights. Every
other node is lowered to steps; if its lowering refuses, it becomes a `ReferenceStep`. The memory
plan then places all other values in one arena. A plan contains no memory of a request:
`subgraph.engine.executable.executable_plan` binds it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from subgraph.engine.planner.block_width import float_block
from subgraph.engine.planner.branches import plan_if
from subgraph.engine.planner.concrete_types import (
    MAX_SHAPE_ELEMENTS,
    concrete,
    infer_concrete,
    is_shape_like,
    propagate_concrete,
)
from subgraph.engine.planner.constants import (
    content_of,
    derive,
    derived_operand,
    parameters_of,
)
from subgraph.engine.planner.graph_outputs import place_outputs
from subgraph.engine.planner.layouts import LayoutAssigner
from subgraph.engine.planner.lowering import Lowering, LoweringRule, Unsupported, ValueNeeded
from subgraph.engine.planner.memory import Life, assign_offsets, join_in_place, lives_of
from subgraph.engine.planner.operands import Operand, Storage
from subgraph.engine.planner.plan_types import (
    Item,
    Plan,
    PlanOptions,
    ReferenceStep,
    UnknownShapeError,
    constant,
)
from subgraph.errors import DeviceError, ShapeError, SubgraphError, described
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.limits import (
    check_memory,
    check_time,
    enter_run,
    leave_run,
    memory_limit,
    size_in_bytes,
)
from subgraph.graph.parameters import Parameter, Versions
from subgraph.graph.types import Array, TensorType, ValueType, numpy_dtype
from subgraph.operators.inference import check_operands, has_requirement
from subgraph.operators.operator import is_random, operator_of
from subgraph.operators.reference import evaluate
from subgraph.operators.shape_values import from_array, has_symbolic, is_arithmetic, to_array
from subgraph.runtime.control_flow import is_branching
from subgraph.system import guard_pages

# Most bytes of a value that is computed while planning (estimate); every run computes larger ones.
_MAX_FOLDED_BYTES = 1 << 28
_MAX_ALL_FOLDED_BYTES = 1 << 30  # the same of all such values of a plan together (estimate)
# Bytes of results for a byte of inputs (estimate); only operators that grow give more.
_MAX_GROWTH = 256
_MAX_KEY_ELEMENTS = 32  # most elements of an input on whose content plans may depend (estimate)

_LOG = logging.getLogger("subgraph.engine")

# Errors of lowerings on attributes or shapes that no valid node has.
_INVALID_NODE_ERRORS = (
    ArithmeticError,
    AttributeError,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
)


def make_plan(
    graph: Graph,
    types: Sequence[TensorType | None],
    values: Mapping[int, Array],
    options: PlanOptions,
) -> Plan:
    """Return the plan of a graph.

    Args:
        graph: The graph; its nodes may be fused ones.
        types: Concrete type of each graph input; None for one that is a weight.
        values: Content of inputs by position, for those on which shapes depend.
        options: Options of plans.

    Raises:
        UnknownShapeError: A shape depends on the content of inputs that are not in ``values``.
        ShapeError: The inputs do not fit the graph.
        LimitError: The plan needs more memory than the budget.
    """
    return Planner(graph, types, values, options).plan()


class Planner:
    """Makes one plan; it is the `PlanInProgress` of the functions that plan a part.

    Attributes:
        in_place_pairs: (output, input, step) where the output may overwrite the input.
        read_versions: Versions of the parameters whose content the plan depends on.
        folded: Values computed while planning, which count against the memory budget.
        folded_bytes: Bytes of these.
        derived_bytes: Bytes of weights that are computed from weights.
    """

    def __init__(
        self,
        graph: Graph,
        types: Sequence[TensorType | None],
        values: Mapping[int, Array],
        options: PlanOptions,
    ) -> None:
        self.graph = graph
        self.options = options
        self.operands: dict[Value, Operand] = {}
        self.known_elements: dict[Value, Array | None] = {}
        self.items: list[Item] = []
        self.in_place_pairs: list[tuple[Operand, Operand, int]] = []
        self.read_versions: dict[Parameter, int] = {}
        self.memory_limit = memory_limit()
        self.folded: list[Any] = []
        self.folded_bytes = self.derived_bytes = 0
        rounds = options.properties.get("INFERENCE_PRECISION") == "bfloat16"
        block = float_block(graph, rounds=rounds)
        self.layouts = LayoutAssigner(self.items.append, options.blocked, block)
        self.inputs = [
            self._input(k, value, types[k], values.get(k)) for k, value in enumerate(graph.inputs)
        ]

    def _input(
        self, position: int, value: Value, type_: TensorType | None, known: Array | None
    ) -> Operand | None:
        if type_ is None:
            return None
        operand = Operand.of(value.name, type_)
        operand.known = known
        operand.storage = Storage("input", operand.nbytes, index=position)
        self.operands[value] = operand
        return operand

    # ------------------------------------------------------------------ values

    def operand(self, value: Value) -> Operand:
        """Return the operand of a value; that of a weight is created at its first use."""
        found = self.operands.get(value)
        if found is not None:
            return found
        if value.parameter is None:
            raise ShapeError(
                f"value {value.name!r} of {self.graph.name!r} is neither computed nor an input"
            )
        found = self.operands[value] = self._weight(value.name, value.parameter)
        return found

    def _weight(self, name: str, parameter: Parameter) -> Operand:
        operand = Operand.of(name, parameter.type)
        operand.source = parameter
        operand.storage = Storage("constant", operand.nbytes, content=parameter)
        if is_shape_like(parameter):
            operand.known = parameter.array
            # The content may decide shapes or kernels, so a new version of the parameter needs a
            # new plan.
            self.read_versions[parameter] = parameter.version
        return operand

    def _read_weight(self, operand: Operand | None) -> bool:
        """Make the plan depend on the content of an operand; False if it is not a small weight."""
        if operand is None or operand.known is not None or operand.size > MAX_SHAPE_ELEMENTS:
            return False
        if operand.source is None:
            return False
        operand.known = content_of(operand.source).reshape(operand.shape)
        read = parameters_of(operand.source)
        self.read_versions.update((parameter, parameter.version) for parameter in read)
        return True

    def _elements(self, value: Value | None) -> Array | None:
        if value is None:
            return None
        found, known = self.known_elements.get(value), self.operand(value).known
        return from_array(known) if found is None and known is not None else found

    def _inputs_elements(self, node: Node, inputs: Sequence[Operand | None]) -> list[Array | None]:
        """Return the known elements of a node's inputs.

        If those of one input are symbolic sizes, small weights beside it are read, too: the size
        of the result follows from both.
        """
        found = [self._elements(value) for value in node.inputs]
        most = max((e.size for e in found if e is not None and has_symbolic(e)), default=0)
        for k, (value, operand) in enumerate(zip(node.inputs, inputs, strict=True)):
            if value is None or operand is None or operand.size > most:
                continue
            if found[k] is None and self._read_weight(operand):
                found[k] = self._elements(value)
        return found

    def assume(self, value: Value, dtype: str, shape: tuple[int, ...]) -> None:
        """Set the type of a value whose producer is not planned.

        Args:
            value: The value.
            dtype: Its dtype.
            shape: Its concrete shape.
        """
        operand = self.operands[value] = Operand(value.name, dtype, shape)
        operand.storage = Storage("arena", operand.nbytes)

    # ------------------------------------------------------------------ nodes

    def plan(self) -> Plan:
        """Plan all nodes, then the memory."""
        for node in self.graph.nodes:
            self.add(node)
        return self.finish()

    def finish(self) -> Plan:
        """Plan the memory; all nodes are planned."""
        # Outputs are placed after all nodes are planned: a storage of kind "output" can no longer
        # become a part of another one, as `Lowering.place` needs. Lives follow, since outputs may
        # add steps.
        outputs = place_outputs(self, copies=self.options.lowering.copies_outputs)
        lives = lives_of(self.items, outputs)
        # Sharing is decided before the offsets, because a storage inside another one needs no
        # offset.
        joined = join_in_place(self.in_place_pairs, lives)
        placed = [(s, life) for s, life in lives.items() if s.kind == "arena"]
        offsets, total = self.place_storages(
            [s.nbytes for s, _ in placed], [life for _, life in placed]
        )
        self._check_total(total, outputs)
        return Plan(
            self.graph,
            tuple(self.items),
            tuple(self.inputs),
            outputs,
            {storage: offset for (storage, _), offset in zip(placed, offsets, strict=True)},
            total,
            Versions(self.read_versions.items()),
            self.layouts.reorders,
            joined,
        )

    def _check_total(self, arena: int, outputs: Sequence[Operand]) -> None:
        results = sum(operand.nbytes for operand in outputs)
        count = arena + results + self.folded_bytes + self.derived_bytes
        if not self.options.lowering.copies_outputs:  # buffers of the device, and the host's arrays
            count += results + sum(operand.nbytes for operand in self.inputs if operand)
        check_memory(
            count, f"graph {self.graph.name!r}, for the values that live at the same time,"
        )

    def place_storages(
        self, sizes: Sequence[int], lives: Sequence[Life]
    ) -> tuple[Sequence[int], int]:
        """Return the offsets of storages in the arena, and the arena's size, in bytes.

        Args:
            sizes: Bytes of each storage.
            lives: Life of each storage.
        """
        if self.options.lowering.uses_guard_pages:
            return guard_pages.guarded_offsets(sizes)
        return assign_offsets(sizes, lives)

    def add(self, node: Node) -> None:
        """Plan one node; all nodes before it are planned."""
        check_time(f"planning node {node.name!r} ({node.op_type})")
        if is_branching(node) and self.options.lowering.branches:
            plan_if(self, node)
            return
        inputs = [None if v is None else self.operand(v) for v in node.inputs]
        # Float weights are not read by default; here they are factors or bounds that decide a size.
        for k in operator_of(node).sized_by:
            if k < len(inputs):
                self._read_weight(inputs[k])
        present = [operand for operand in inputs if operand is not None]
        constant_inputs = not node.captures and all(operand.constant for operand in present)
        if constant_inputs and self._fold(node, inputs):
            return
        try:
            outputs = self._outputs(node, inputs)
        except UnknownShapeError:
            # The shape may follow from small weights whose content was not needed so far. Every
            # retry reads at least one more, so that the recursion ends.
            read = [self._read_weight(operand) for operand in present]
            if not any(read):
                raise
            self.add(node)
            return
        if outputs is not None:
            self._lower(node, inputs, outputs)

    def _fold(self, node: Node, inputs: Sequence[Operand | None]) -> bool:
        """Compute a node on known inputs, or make its outputs derived weights.

        Returns:
            False if the node has to run.
        """
        # A random operator has to draw again in every run.
        if node.bodies or is_random(node):
            return False
        if any(o is not None and o.known is not None and has_symbolic(o.known) for o in inputs):
            return False  # the content follows from dimensions that differ from call to call
        if node.subgraph is not None:
            self._plan_inner_nodes(node, inputs)
            return True
        if all(operand is None or operand.known is not None for operand in inputs):
            if self._is_large(node, inputs):
                return False
            arrays = [None if o is None else o.known for o in inputs]
            results = self._evaluate(node, arrays)
            if any(r is not None and not isinstance(r, np.ndarray) for r in results):
                return False
            for value, result in zip(node.outputs, results, strict=True):
                if result is not None:
                    self.operands[value] = constant(value.name, result)
            return True
        # The results are checked against these types when they are computed (`derive`).
        types = [value.type for value in node.outputs]
        if not all(isinstance(t, TensorType) and t.is_static for t in types):
            types = self._infer(node, inputs)
        if not all(isinstance(t, TensorType) and t.is_static for t in types):
            return False
        for k, (value, type_) in enumerate(zip(node.outputs, types, strict=True)):
            assert isinstance(type_, TensorType)
            weight = derive(node, inputs, k, type_)
            operand = derived_operand(value.name, type_.dtype, concrete(type_), weight)
            self._check_size(node, operand.nbytes)
            self.derived_bytes += operand.nbytes
            self.operands[value] = operand
        return True

    def _is_large(self, node: Node, inputs: Sequence[Operand | None]) -> bool:
        """Return whether the outputs of a node on known inputs are too large for a plan."""
        # The types are inferred only if the results can be large: other operators return at most a
        # small multiple of what they read.
        read = sum(operand.nbytes for operand in inputs if operand is not None)
        if read <= _MAX_FOLDED_BYTES // _MAX_GROWTH and not operator_of(node).grows:
            return False
        types = self._infer(node, inputs)
        tensors = [type_ for type_ in types if isinstance(type_, TensorType) and type_.is_static]
        made = sum(map(size_in_bytes, tensors))
        return made > _MAX_FOLDED_BYTES or made + self.folded_bytes > _MAX_ALL_FOLDED_BYTES

    def _evaluate(self, node: Node, arrays: Sequence[Array | None]) -> list[Any]:
        # The folded values count as those of a run, so that the operator sees what is left of the
        # memory budget.
        enter_run(self.folded)
        try:
            results = evaluate(node, arrays)
        except SubgraphError as error:
            error.add_note(
                f"while node {node.name!r} ({node.op_type}) was computed during planning"
            )
            raise
        finally:
            leave_run()
        self.folded += results
        self.folded_bytes += sum(r.nbytes for r in results if isinstance(r, np.ndarray))
        return results

    def _infer(self, node: Node, inputs: Sequence[Operand | None]) -> list[ValueType | None]:
        known: list[Array | None] = []
        for value, operand in zip(node.inputs, inputs, strict=True):
            if operand is None or operand.known is not None:
                known.append(None if operand is None else operand.known)
            else:
                known.append(to_array(self._elements(value), operand.type))
        return infer_concrete(node, _types_of(inputs), known)

    def _outputs(
        self, node: Node, inputs: Sequence[Operand | None]
    ) -> list[tuple[Value, TensorType]] | None:
        """Return the outputs with concrete types; None if all their elements are known.

        Raises:
            UnknownShapeError: The shape of an output follows from unknown values.
        """
        partials = self._inputs_elements(node, inputs)
        types = self._infer(node, inputs)
        partial = propagate_concrete(node, partials, _types_of(inputs))
        self.known_elements[node.outputs[0]] = partial
        # An output whose elements are all known, such as that of Shape, needs no step. Its elements
        # may be symbolic integers.
        first = to_array(partial, types[0])
        if first is not None and len(node.outputs) == 1:
            assert isinstance(types[0], TensorType), "its elements are known"
            self.operands[node.outputs[0]] = constant(node.outputs[0].name, first, types[0].dtype)
            return None
        outputs: list[tuple[Value, TensorType]] = []
        for value, type_ in zip(node.outputs, types, strict=True):
            if not isinstance(type_, TensorType) or not type_.is_static:
                # A plan for each content of the other inputs would be made in vain.
                sizing = operator_of(node).sized_by
                deciding = [node.inputs[k] for k in sizing if k < len(node.inputs)] or node.sources
                raise UnknownShapeError(node, self._deciding_inputs(*deciding))
            self._check_size(node, size_in_bytes(type_))
            outputs.append((value, type_))
        return outputs

    def _check_size(self, node: Node, count: int) -> None:
        if count > self.memory_limit:
            check_memory(count, f"node {node.name!r} ({node.op_type})")

    def _deciding_inputs(self, *values: Value | None) -> list[int]:
        """Return the positions of small graph inputs from which values are computed.

        If some of these are integers or booleans, only those.
        """
        position = {value: k for k, value in enumerate(self.graph.inputs)}
        found: list[int] = []
        seen: set[Value] = set()
        work = [value for value in values if value is not None]
        while work:
            value = work.pop()
            if value in seen:
                continue
            seen.add(value)
            operand = self.operands.get(value)
            if operand is None or operand.size > MAX_SHAPE_ELEMENTS:
                continue
            if value in position and operand.known is None and operand.size <= _MAX_KEY_ELEMENTS:
                found.append(position[value])
            # Results of other operators are data: their content differs in nearly every call.
            if value.producer is not None and is_arithmetic(value.producer):
                work.extend(value.producer.sources)
        names = self.graph.inputs
        whole = [k for k in found if numpy_dtype(self.operands[names[k]].dtype).kind in "iub"]
        return sorted(whole or found)

    def _lower(
        self,
        node: Node,
        inputs: Sequence[Operand | None],
        outputs: Sequence[tuple[Value, TensorType]],
    ) -> None:
        """Add the steps of a node's lowering, else those of its inner nodes or a reference step."""
        try:
            rule = self.options.lowering.rule_of(node)
            rule.check_dtype(node, inputs)
            if node.subgraph is not None and has_requirement(node):
                _check_fused(node, inputs)
            low = self._run_lowering(node, rule, inputs, outputs)
        except Unsupported as reason:
            if node.subgraph is not None:
                self._plan_inner_nodes(node, inputs)
            else:
                self._add_reference_step(node, inputs, outputs, str(reason))
            return
        except ValueNeeded as needed:
            raise UnknownShapeError(
                node, self._deciding_inputs(node.inputs[needed.index])
            ) from None
        first = len(self.items)
        self.items += low.steps
        for (value, _), operand in zip(outputs, low.outputs, strict=True):
            self.operands[value] = operand
        if not low.in_place_pairs:
            return
        # An in-place pair is valid from the step that writes the output; a node may emit several
        # steps, and earlier ones may still read the input.
        step_of: dict[Operand, int] = {}  # the first step that has an operand as an argument
        for number, step in enumerate(low.steps, first):
            for argument in step.arguments:
                if isinstance(argument, Operand):
                    step_of.setdefault(argument, number)
        for output, source in low.in_place_pairs:
            if output in step_of:
                self.in_place_pairs.append((output, source, step_of[output]))

    def _plan_inner_nodes(self, node: Node, inputs: Sequence[Operand | None]) -> None:
        """Plan the inner nodes of a fused node for which there is no kernel with these shapes."""
        inner = node.subgraph
        assert inner is not None
        for value, operand in zip(inner.inputs, inputs, strict=True):
            if operand is not None:
                self.operands[value] = operand
        for inside in inner.nodes:
            self.add(inside)
        for value, source in zip(node.outputs, inner.outputs, strict=True):
            self.operands[value] = self.operand(source)

    def _run_lowering(
        self,
        node: Node,
        rule: LoweringRule,
        inputs: Sequence[Operand | None],
        outputs: Sequence[tuple[Value, TensorType]],
    ) -> Lowering:
        """Lower a node in the first layout that its lowering supports."""

        def attempt(arranged: Sequence[Operand | None], blocked: bool) -> Lowering:
            fresh = [self._new_operand(value, type_, blocked) for value, type_ in outputs]
            # Every attempt gets fresh operands, since a refused lowering may have changed its
            # outputs.
            low = self.options.lowering(
                node,
                arranged,
                fresh,
                threads=self.options.threads,
                options=dict(self.options.properties),
                float_block=self.layouts.float_block,
            )
            try:
                rule.function(node, low)
            except (SubgraphError, MemoryError):
                low.undo()
                raise
            except _INVALID_NODE_ERRORS as error:
                # The reference raises the error that names the invalid attribute or shape.
                low.undo()
                reason = f"its lowering failed: {described(error)}"
                _LOG.info("node %r (%s): %s", node.name, node.op_type, reason, exc_info=error)
                if rule.custom:
                    _warn_of_kernel(f"{node.domain}::{node.op_type}", reason)
                raise Unsupported(reason) from error
            except Exception as error:
                low.undo()
                where = f"node {node.name!r} ({node.op_type})"
                raise DeviceError(f"{where}: its lowering raised {described(error)}") from error
            return low

        return self.layouts.lower(node, rule, inputs, [t for _, t in outputs], attempt)

    def _new_operand(self, value: Value, type_: TensorType, blocked: bool) -> Operand:
        operand = Operand.of(value.name, type_)
        if blocked and operand.rank > 2:
            self.layouts.make_blocked(operand)
        operand.storage = Storage("arena", operand.nbytes)
        return operand

    def _add_reference_step(
        self,
        node: Node,
        inputs: Sequence[Operand | None],
        outputs: Sequence[tuple[Value, TensorType]],
        reason: str,
    ) -> None:
        # The reference evaluates NumPy arrays, which the blocked layout cannot represent.
        plain = tuple(None if o is None else self.layouts.plain(o) for o in inputs)
        made = tuple(self._new_operand(value, type_, False) for value, type_ in outputs)
        for (value, _), operand in zip(outputs, made, strict=True):
            self.operands[value] = operand
        self.items.append(ReferenceStep(node, plain, made, reason))


def _types_of(operands: Sequence[Operand | None]) -> list[TensorType | None]:
    return [None if operand is None else operand.type for operand in operands]


def _check_fused(node: Node, inputs: Sequence[Operand | None]) -> None:
    """Check the operands of a fused node against the requirements of its kernel.

    Fusions rely on declared and inferred types, and the types that a file declares may be wrong.

    Raises:
        Unsupported: An operand does not fit, so that the node's inner nodes have to be planned.
    """
    try:
        check_operands(node, _types_of(inputs), [None if o is None else o.known for o in inputs])
    except ShapeError as error:
        raise Unsupported(f"the fused form does not hold: {error}") from error


@cache
def _warn_of_kernel(operator: str, reason: str) -> None:
    """Log once that a user's kernel is not used. Its lowering is more likely wrong than a node."""
    _LOG.warning("nodes of %s run without their kernel: %s", operator, reason)

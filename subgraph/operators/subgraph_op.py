"""Subgraph ops: stateful operators that run the regions of a partition.

A subgraph node holds its inner graph and a `SubgraphOp`. An accelerator defines a child class; the
default one, ``_subgraph_op``, runs the inner graph with the default executor. `subgraph_node`
makes the node. The executor opens a `Session` of each op for each request, and calls that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs

from subgraph.errors import DeviceError, PartitionError, require_type
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.parameters import Parameter, Unchecked
from subgraph.graph.result_arrays import fill_outputs, is_array, is_list, own_results, read_only
from subgraph.graph.types import Array, ValueType
from subgraph.operators.op_checks import (
    DEFAULT_DEVICE,
    Check,
    check_op,
    checks_for,
    contract_error,
    first_misfit,
    inferred_checks,
    output_types,
    region_types,
    result_type_error,
)
from subgraph.system.forking import computed_once
from subgraph.system.hooks import Hook
from subgraph.weights.cache import WeightCache, WeightEntry

RunInputs = Callable[..., Sequence[Any]]  # see Session.run_inputs
Repeat = Callable[[Sequence[Any]], Sequence[Any] | None]
EnqueueFinish = tuple[
    Callable[[Sequence[Any], "Sequence[Array | None] | None"], Any], Callable[[Any], Sequence[Any]]
]
# Takes the inputs, and the number of iterations (None: until the condition is false); see
# Session.iterations.
RunIterations = Callable[[Sequence[Any], "int | None"], "IterationsResult | None"]
# An estimate: more shapes than a model with dynamic sizes usually sees again.
_MAX_CHECKED_SHAPES = 64  # most sets of input shapes of a session whose output types are cached
DOMAIN = "subgraph"
OP_TYPE = "_subgraph_op"
# Key of a node's metadata: the device that runs the node; set by users and by HETERO.
AFFINITY = "affinity"
# Key of a node's metadata in a compiled graph: the device that its affinity named before.
ASKED_AFFINITY = "asked_affinity"
# Key of a node's metadata in a compiled graph: the region of the user's partition that it was in.
REGION = "subgraph_region"
# The executor is in ``runtime/``, which this folder must not import.
_default_session: Hook[[DefaultSubgraphOp], Session] = Hook("session of the default executor")


@attrs.frozen
class Wiring:
    """How a loop passes values between iterations, as positions of a body's inputs and outputs.

    Attributes:
        number: The input that is the number of the iteration; None if there is none.
        condition: The output that is false after the last iteration; None if there is none.
        states: The output and the input of each carried value; the input is None if nothing reads
            it.
        items: The inputs that are an item of an array, along its first axis, in each iteration.
        scans: The outputs that are stacked over all iterations, along a new first axis.
    """

    number: int | None
    condition: int | None
    states: tuple[tuple[int, int | None], ...]
    items: tuple[int, ...]
    scans: tuple[int, ...]


@attrs.frozen
class IterationsResult:
    """The results of iterations of a loop.

    Attributes:
        states: The last states, in the order of `Wiring.states`.
        scans: Each scan output, stacked over the iterations.
    """

    states: list[Array]
    scans: list[Array]


@attrs.frozen
class ProfileEntry:
    """The time of one node in a run.

    Attributes:
        node: The node's name.
        op_type: Its operator.
        device: The device that ran it.
        kernel: The kernel that ran it, "reference" for the reference implementation.
        seconds: Wall time, without that of nodes in its bodies, which have entries of their own.
        bytes: Bytes of its inputs and outputs, 0 if not known.
        flops: Floating-point operations, 0 if not known.
        fallback: Why another device than its own ran it; empty if its own did.
        region: Name of the region of the user's partition that it is in, names separated by commas
            if one kernel ran nodes of several; empty if it is in none.
        request: Id of the request whose run it was, 0 if it was none.
        start: When it began, in seconds of ``time.perf_counter``; 0 if not known.
        end: When it ended, with its bodies; 0 if not known.
        thread: Identifier of the thread that ran it, or began it where several threads shared it
            (``threading.get_ident``); 0 for a queue of the device.
    """

    node: str
    op_type: str
    device: str
    kernel: str
    seconds: float
    bytes: int = 0
    flops: int = 0
    fallback: str = ""
    region: str = ""
    request: int = 0
    start: float = 0.0
    end: float = 0.0
    thread: int = 0


class Session:
    """Runs a subgraph op for one request, with memory of its own; used by one thread at a time.

    This class calls ``op.forward``. An op with buffers per request returns an instance of a child
    class from `SubgraphOp.session`.

    Attributes:
        owns_states: Whether nothing else reads the states of the request that it gets as inputs,
            so that it may overwrite them in their buffers.
    """

    owns_states = False

    def __init__(self, op: SubgraphOp) -> None:
        """Open a session of ``op``."""
        self.op = op
        self._data_inputs = [k for k, v in enumerate(op.subgraph.inputs) if v.parameter is None]
        self._checks: dict[tuple[Any, ...], list[Check]] = {}

    def __call__(
        self, inputs: Sequence[Any], outputs: Sequence[Array | None] | None = None
    ) -> Sequence[Any]:
        """Run the op.

        Args:
            inputs: One item for each input of the inner graph: an array with any strides; a weight
                comes as its Parameter.
            outputs: Arrays to write results into, None for results that the op allocates.

        Returns:
            One array for each output; the caller owns them.

        Raises:
            ShapeError: the inputs do not fit the inner graph.
            DeviceError: the results do not have the types that follow from these inputs.
        """
        # Parameters have fixed types, so that only the other inputs decide whether a cached check
        # fits.
        items = [inputs[k] for k in self._data_inputs]
        key = tuple([(x.dtype, x.shape) if is_array(x) else None for x in items])
        checks = self._checks.get(key)
        if checks is None:
            # Shapes that change with every call must not fill the memory of a long-lived request.
            if len(self._checks) >= _MAX_CHECKED_SHAPES:
                self._checks.clear()
            checks = self._checks[key] = checks_for(self.op, inputs)
        # Another device repeats the run on these inputs if the op fails, and other nodes read them.
        results = self.op.forward([read_only(item) for item in inputs])
        if not is_list(results):
            returned = f"a {type(results).__name__}"
            raise contract_error(self.op, returned, "return a list of arrays, one for each output")
        if len(results) != len(checks):
            wanted = f"its subgraph {self.op.subgraph.name!r} has {len(checks)} outputs"
            raise contract_error(self.op, f"{len(results)} results", wanted)
        misfit = first_misfit(results, checks)
        if misfit is not None:
            checks = self._checks[key] = inferred_checks(self.op, inputs)
            misfit = first_misfit(results, checks)
        if misfit is not None:
            check = checks[misfit]
            assert check is not None, "it failed"
            raise result_type_error(self.op, misfit, results[misfit], check[0])
        # The caller may write to results. Memory of an input or of a weight must not be among them.
        results = own_results(results, inputs)
        return results if outputs is None else fill_outputs(results, outputs)

    def cancel(self) -> None:
        """Stop the present run as soon as possible; its results are not used.

        It is called from another thread, possibly before the run has begun, and has an effect until
        `resume`. The default does nothing.
        """

    def resume(self) -> None:
        """Undo `cancel`, because a new run is about to begin."""

    def states(self) -> dict[str, Array]:
        """Return the arrays that the op carries from one run of a request to the next, by name.

        Another device, or a later run, continues from these arrays. After a run that raised an
        error they are those from before it. The default has none.
        """
        return {}

    def set_states(self, states: Mapping[str, Array]) -> None:
        """Set the states with which the next run begins.

        Args:
            states: As `states` of another session returned them; empty for the initial states.

        Raises:
            DeviceError: The op does not have such states.
        """
        if states:
            names = ", ".join(map(repr, states))
            raise DeviceError(
                f"op {type(self.op).__name__} of device {self.op.device} has no states, so that it "
                f"cannot continue from {names} of subgraph {self.op.subgraph.name!r}"
            )

    def share(self, other: Session) -> None:
        """Use the memory of another session of this class, if that saves memory.

        Called before the first run. Both sessions belong to one request and never run at the same
        time. The content of that memory is undefined at the begin of each run.
        """

    def run_inputs(self) -> RunInputs | None:
        """Return a function that runs the op on the inputs that are not weights, or None.

        Its arguments are these arrays, and ``outputs`` as in a call of the session. A snapshot is
        pinned when it is called.
        """
        return None

    def repeat(self) -> Repeat | None:
        """Return a function that repeats the last run for other inputs, or None.

        Its argument is the sequence of inputs of the function of `run_inputs`, and no snapshot is
        pinned. It returns the results, or None at once if shapes or parameters differ from those of
        the last run.
        """
        return None

    def enqueue_finish(self) -> EnqueueFinish | None:
        """Return two functions that do the work of the function of `run_inputs`, or None.

        The first enqueues the run on the device and returns at once. The second takes the result of
        the first, waits for the device and returns the results of the run. Other requests use the
        thread of the first function in between.
        """
        return None

    def iterations(self, wiring: Wiring) -> RunIterations | None:
        """Return a function that runs all iterations of the op as the body of a loop, or None.

        Its first argument are the inputs of the first iteration, with whole arrays for
        ``wiring.items``; at least one iteration is wanted. It returns None, with nothing done, if
        the caller has to run the iterations, because values change their shapes or do not fit into
        memory. It raises RequestCancelledError if `cancel` is called meanwhile.

        Args:
            wiring: How values are passed between iterations.
        """
        return None

    def measure(self) -> None:
        """Measure the nodes of the subgraph in later runs, if the op supports that."""

    def profile(self) -> list[ProfileEntry]:
        """Return the times of the subgraph's nodes in the last run; empty if not measured."""
        return []


class SubgraphOp:
    """A stateful operator that runs the inner graph of a subgraph node.

    Define a child class with `forward` to run regions on an accelerator. Several requests call
    `forward` at once from their threads: store data of one call in local variables, data of a
    request in a `Session`.

    Attributes:
        subgraph: The inner graph; read only. Its inputs correspond one to one to the node's; an
            input that is a weight has its Parameter.
        device: Name of the device that runs the op, for profiles.
        fallback: The devices that run the subgraph when this op fails; set by HETERO and by
            devices that use others.
        concurrent: Whether this op may run at the same time as other regions of one request on the
            same device; regions on different devices always may.
        keep: An object that must live as long as the op, such as the file of its weights.
    """

    device = DEFAULT_DEVICE
    fallback: Fallback | None = None
    concurrent = False
    keep: Any = None
    _users = 0

    def __init__(self, subgraph: Graph) -> None:
        """Make an op for the inner graph; child classes call this first."""
        self.subgraph = subgraph

    @computed_once
    def weights(self) -> WeightCache:
        """The cache of arrays that `forward` computes from parameters (reformatted weights)."""
        return WeightCache()

    @property
    def says_types(self) -> bool:
        """Whether the op's class overrides `infer_types`."""
        return type(self).infer_types is not SubgraphOp.infer_types

    def runs_on(self) -> list[str]:
        """Return the devices that run the region."""
        return [self.device]

    def add_user(self) -> None:
        """Count one more compiled model that runs this op."""
        self._users += 1

    def remove_user(self) -> bool:
        """Count one compiled model less; return whether it was the last one."""
        self._users -= 1
        return self._users == 0

    def release(self) -> None:
        """Free memory that can be computed again; called when no compiled model runs the op.

        The op itself stays until Python's garbage collection: graphs and nodes refer to each other.
        """
        self.weights.clear()

    def forward(self, inputs: list[Any]) -> list[Array]:
        """Compute the outputs.

        Args:
            inputs: One item for each input of ``subgraph``: a read-only array with any strides, or
                for a weight its Parameter, whose ``array`` has the version that this run must use.

        Returns:
            One array for each output of ``subgraph``. The caller copies those in the memory of an
            input or of another output, and read-only ones.
        """
        raise NotImplementedError(f"{type(self).__name__} has no forward of its own: write forward")

    def infer_types(self, inputs: Sequence[ValueType | None]) -> Sequence[ValueType | None]:
        """Return the types of the outputs for these types of the inputs.

        By default they follow from the inner graph. Override this method if the accelerator's
        results differ, for example in a size that it pads.

        Args:
            inputs: The type of each input of ``subgraph``, None for one that is not known; for a
                weight that of its Parameter.

        Raises:
            ShapeError: the inputs do not fit the inner graph.
        """
        return region_types(self.subgraph, inputs)

    def session(self) -> Session:
        """Return a new session; each request has one for each of its subgraph nodes."""
        return Session(self)

    def prepare(self) -> None:
        """Prepare weights and programs before the first run; an export writes the weights."""

    def run_report(self) -> dict[str, Any]:
        """Return numbers of runs by strategy, and the reasons; {} if there is only one strategy."""
        return {}

    def to_export(self, file: ExportFile) -> dict[str, Any] | None:
        """Return the state of the op, besides its weights, for an exported model.

        Args:
            file: The file being written; arrays of the state are added to it.

        Returns:
            Plain JSON that `restore` gets on import; None if the op has no such state.
        """
        return None

    def restore(self, saved: Mapping[str, Any], file: ImportFile) -> None:
        """Set the state of the op from an exported model that this user has signed.

        An op ignores state that does not fit and computes it anew.

        Args:
            saved: The JSON that `to_export` returned.
            file: The imported file, from which arrays are read.
        """


def runs_by_default(op: SubgraphOp | None) -> bool:
    """Return whether the default executor runs a subgraph node of this op."""
    return op is None or type(op) is DefaultSubgraphOp


class ExportFile(Protocol):
    """Interface to an exported model while it is written, for `SubgraphOp.to_export`."""

    def array(self, array: Array) -> Any:
        """Add an array to the file; return plain JSON that identifies it in `ImportFile`."""
        ...

    def weight(self, entry: WeightEntry) -> Any:
        """Add the array of a cache entry; return plain JSON that identifies it, or None.

        None means that the file format cannot hold an array of this dtype.
        """
        ...


class ImportFile(Protocol):
    """Interface to an imported model that this user has signed, for `SubgraphOp.restore`."""

    def array(self, stored: Any) -> Array:
        """Return the array that `ExportFile.array` or `ExportFile.weight` added."""
        ...

    def unchecked(self, stored: Any) -> Unchecked:
        """Return that array with its checksum verified at the first read, not at import."""
        ...

    def sources(self, stored: Any) -> tuple[Parameter, ...]:
        """Return the parameters from which the weight was computed; () if it is a parameter."""
        ...


class Fallback(Protocol):
    """Interface to the devices that run a subgraph when its op fails."""

    @property
    def replacement(self) -> SubgraphOp | None:
        """The op that runs the subgraph until the original is tried again; None: the original."""
        ...

    @property
    def failures(self) -> int:
        """How often the op has failed."""
        ...

    @property
    def cause(self) -> str:
        """Text of the error with which the op failed last."""
        ...

    @property
    def state(self) -> str:
        """Why another device runs the subgraph; empty while its own does."""
        ...

    def session(self, op: SubgraphOp) -> Session | None:
        """Return a session that can change to another device; None: use the op's own session."""
        ...

    def recover(self, error: Exception, session: Session) -> Session | None:
        """Return a session for the run in which ``session`` failed and later runs; None: raise."""
        ...

    def replace_session(self, op: SubgraphOp, error: Exception) -> Session | None:
        """Return a session for the runs of an op that could not open its own; None: raise."""
        ...


def fallback_of(node: Node) -> Fallback | None:
    """Return the devices that run a subgraph node when its op fails; None: none."""
    return node.fallback or (None if node.op is None else node.op.fallback)


def open_session(op: SubgraphOp, fallback: Fallback | None = None) -> Session:
    """Return a new session of the op, or one by which its fallback can run the subgraph.

    Without ``fallback``, that of the op is used. An error of the op's ``session`` is raised if no
    other device can run the subgraph.
    """
    fallback = fallback or op.fallback
    if fallback is None:
        return open_own(op)
    try:
        # The fallback comes first: while its breaker is open, the op's own session would only fail
        # again.
        return fallback.session(op) or open_own(op)
    except Exception as error:
        session = fallback.replace_session(op, error)
        if session is None:
            raise
        return session


def open_own(op: SubgraphOp) -> Session:
    """Return a new session of the op itself.

    ``session`` is looked up in the class, like all methods of ops that the framework calls except
    ``forward``: an attribute of this name, such as a runtime's session, does not shadow it.

    Raises:
        DeviceError: ``session`` returned something else.
    """
    session = type(op).session(op)
    if not isinstance(session, Session):  # pyright: ignore[reportUnnecessaryIsInstance]
        name, made = f"{type(op).__name__}.session", type(session).__name__
        error = DeviceError(
            f"{name} returned a {made}; return an instance of a child of sg.Session"
        )
        error.lost = False
        raise error
    return session


class DefaultSubgraphOp(SubgraphOp):
    """The op ``_subgraph_op``: runs the inner graph node by node with the default executor.

    Attributes:
        plan: The executor's plan for the inner graph, which all sessions share; None: none yet.
    """

    plan: Any = None

    def forward(self, inputs: list[Any]) -> list[Any]:
        """Run the inner graph; sequences are lists."""
        return list(self.session()(inputs))

    def session(self) -> Session:
        """Return an executor of the inner graph."""
        return _default_session(self)


def subgraph_node(
    subgraph: Graph,
    op: SubgraphOp | None = None,
    name: str = "",
    *,
    inputs: Sequence[Value | None] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Node:
    """Return a node that runs ``subgraph``.

    Args:
        subgraph: The inner graph.
        op: The op that runs it; None: the default executor.
        name: The node's name; "": the graph that the node is added to chooses one.
        inputs: The outer values for the inner inputs. None: new values with the names, types and
            parameters of the inner inputs, which the partition replaces; the outputs then have the
            names of the inner outputs.
        metadata: Metadata of the node.

    Raises:
        PartitionError: ``op`` is no SubgraphOp, overrides neither ``forward`` nor ``session``, is
            made of a graph with other numbers of inputs or outputs, or its ``__init__`` does not
            call its parent's.
    """
    require_type(subgraph, Graph, PartitionError, "the inner graph of the subgraph node")
    require_type(name, str, PartitionError, "the name of the subgraph node")
    types: Sequence[ValueType | None] = [value.type for value in subgraph.outputs]
    if op is None:
        op = DefaultSubgraphOp(subgraph)
    else:
        _check_made(op, subgraph)
        if op.says_types:
            types = output_types(op, [value.type for value in subgraph.inputs])
    outputs = [Value("", type_) for type_ in types]
    if inputs is None:
        inputs = [Value(v.name, v.type, parameter=v.parameter) for v in subgraph.inputs]
        for value, inner in zip(outputs, subgraph.outputs, strict=True):
            value.name = inner.name
    node = Node(OP_TYPE, inputs, outputs=outputs, domain=DOMAIN, version=1, metadata=metadata)
    node.name, node.subgraph, node.op = name, subgraph, op
    return node


def _check_made(op: SubgraphOp, subgraph: Graph) -> None:
    if not isinstance(op, SubgraphOp):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PartitionError(
            f"op of a subgraph node is {op!r}; give a SubgraphOp made of the inner graph, as in "
            "sg.subgraph_node(subgraph, op=MyOp(subgraph))"
        )
    if not hasattr(op, "subgraph"):
        raise PartitionError(
            f"{type(op).__name__}.__init__ does not call super().__init__(subgraph), so the op "
            "has no subgraph; call it first"
        )
    check_op(op, SubgraphOp)
    own, ports = op.subgraph, (len(subgraph.inputs), len(subgraph.outputs))
    if (len(own.inputs), len(own.outputs)) != ports:
        raise PartitionError(
            f"op {type(op).__name__} is made of graph {own.name!r} with {len(own.inputs)} inputs "
            f"and {len(own.outputs)} outputs, its node runs {subgraph.name!r} with {ports[0]} and "
            f"{ports[1]}; make it of that graph"
        )

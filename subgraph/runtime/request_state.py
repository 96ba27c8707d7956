"""States of a request: arrays that it carries from one run to the next.

Stateful subgraph ops have states of their own. A `StatefulModel` has requests that carry outputs of
the model to its inputs, such as the cached keys and values of a decoder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Protocol

import attrs
import numpy as np

from subgraph.errors import ConfigError, ModelError, RequestCancelledError, RequestError
from subgraph.graph.graph import Graph, Node
from subgraph.graph.growing import buffer_of, is_growing, reserved
from subgraph.graph.parameters import Snapshot
from subgraph.graph.types import Array, TensorType, numpy_dtype
from subgraph.operators.subgraph_op import ProfileEntry, Session
from subgraph.runtime.cancel import Cancel
from subgraph.runtime.requested_model import RequestedModel
from subgraph.runtime.runner import DirectRunner, GraphRunner, Runner, Stage
from subgraph.runtime.signature import Port, Results, Signature, port_position
from subgraph.system.registry import nearest

# Positions for which a buffer has room beyond those of its state: a half of them, and at least as
# many as this (estimates: a buffer that grew is copied once).
_MIN_ROOM = 64


class RequestState:
    """One state of a request, made by ``request.query_state``; the request must not be busy.

    Attributes:
        name: Name of the subgraph node and the op's name of the state, as in "lstm_0/hidden"; or
            the model's input that the request provides.
    """

    def __init__(self, name: str, runner: Runner, check_idle: Callable[[], None]) -> None:
        """Refer to a state of the ops of a request.

        Args:
            name: The state's name.
            runner: Runs the request.
            check_idle: Raises RequestError if the request is busy.
        """
        self.name = name
        self._runner = runner
        self._check_idle = check_idle

    @property
    def state(self) -> Array:
        """A copy of the array with which the next run begins; assigning an array replaces it.

        Raises:
            RequestError: The request is busy, or the op has dropped the state.
            ModelError: The assigned array has another dtype or number of dimensions.
            DeviceError: The op does not accept the assigned array.
        """
        return self._found().copy()

    @state.setter
    def state(self, value: Any) -> None:
        held, array = self._found(), np.asarray(value)
        if array.dtype != held.dtype or array.ndim != held.ndim:
            raise ModelError(
                f"state {self.name!r} is {held.dtype} of shape {held.shape}; got {array.dtype} of "
                f"shape {array.shape}"
            )
        self._runner.set_states({**self._runner.states(), self.name: array.copy()})

    def reset(self) -> None:
        """Let the next run begin with the initial state; other states are unchanged.

        Raises:
            RequestError: The request is busy.
        """
        self._check_idle()
        runner = self._runner
        states = runner.states()
        try:
            # Only the ops know their initial states: all are reset, the initial one is read, and
            # the others are set again.
            runner.set_states({})
            first = runner.states()
            wanted = {name: array for name, array in states.items() if name != self.name}
            if self.name in first:
                wanted[self.name] = first[self.name]
            if wanted:
                runner.set_states(wanted)
        except BaseException:
            runner.set_states(states)
            raise

    def _found(self) -> Array:
        self._check_idle()
        states = self._runner.states()
        if self.name not in states:
            raise RequestError(f"state {self.name!r} is gone; {nearest(self.name, states)}")
        return states[self.name]

    def __repr__(self) -> str:
        return f"<RequestState {self.name!r}>"


@attrs.define(eq=False)
class CarriedState:
    """An output of a model that is an input of the next run.

    Attributes:
        port: The input.
        input: Its position among the inputs of a run.
        output: Position of the output.
        array: The array with which the next run begins; None: the initial state.
        grows: Whether regions may append to the array in place.
        added: Positions that the last run appended.
    """

    port: Port
    input: int
    output: int
    array: Array | None = None
    grows: bool = True
    added: int = 0

    def initial(self, sizes: Mapping[str, int], batch: int) -> Array:
        """Return the initial state: zeros, with no positions where the model does not say how many.

        Args:
            sizes: The sizes that other inputs give to names of dimensions.
            batch: Size of the first of several dimensions, if no other input names it.
        """
        type_ = self.port.type
        assert isinstance(type_, TensorType), "`_paired` checked it"
        shape = type_.shape or ()
        unknown = [batch, *[0] * (len(shape) - 1)] if len(shape) > 1 else [0]
        dims = [
            dim if isinstance(dim, int) else sizes.get(str(dim), other)
            for dim, other in zip(shape, unknown, strict=False)
        ]
        dtype = numpy_dtype(type_.dtype)
        return np.full(dims, "", object) if dtype.hasobject else np.zeros(dims, dtype)

    def begin(self, sizes: Mapping[str, int], batch: int) -> Array:
        """Return the array for a run, in a buffer with room if it may grow."""
        array = self.array
        if array is None or not array.size:
            # An empty state has no positions yet, and other inputs may decide the other sizes.
            array = self.initial(sizes, batch)
        if not self.grows or array.ndim < 2 or not array.size or array.dtype.hasobject:
            return array
        buffer, used, added = buffer_of(array), array.shape[-2], self.added
        if buffer is None or used + added > buffer.shape[-2]:
            # The size of a state to which nothing was appended is fixed.
            room = max(used // 2, _MIN_ROOM, 2 * added) if added else 0
            copy = reserved(array, used + room)
            if array is self.array:
                self.array = copy
            array = copy
        return array

    def end(self, before: Array, after: Array) -> None:
        """Take the output of a run as the state.

        Args:
            before: The array with which the run began.
            after: The output.
        """
        buffer = buffer_of(before)
        self.added = after.shape[-2] - before.shape[-2] if after.ndim == before.ndim > 1 else 0
        if buffer is not None and not is_growing(after):
            # Regions did not append in place although there was room; a buffer would be useless.
            self.grows = self.added > 0 and after.shape[-2] > buffer.shape[-2]
        self.array = after


class StatefulRunner(Runner):
    """Runs a model whose states are not among the inputs and outputs of its callers."""

    def __init__(self, inner: Runner, model: StatefulModel) -> None:
        """Wrap a runner of the whole model; the first run begins with the initial states.

        Args:
            inner: The runner.
            model: The stateful model.
        """
        super().__init__(inner.cancel)
        self.inner = inner
        self._ports = model.ports
        self._shown = model.shown
        self._states = [attrs.evolve(state) for state in model.states]
        # The sessions of other runners are of the nodes of other graphs.
        ours = isinstance(inner, (DirectRunner, GraphRunner))
        sessions = inner.sessions() if ours else {}
        for name in model.owners:
            if name in sessions:
                sessions[name].owns_states = True

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run on the inputs; those of states are None."""
        begun = self._begin(inputs)
        return self._end(begun, self.inner.run(begun))

    def wrapped(self, stages: Sequence[Stage]) -> list[Stage]:
        """Return stages of the whole model with the states added before and taken after them."""
        begun: list[Any] = []

        def first(inputs: Any) -> Any:
            begun[:] = self._begin(inputs)
            return stages[0].function(list(begun))

        found = [Stage(stages[0].executor, first), *stages[1:]]
        last = found[-1]
        found[-1] = Stage(last.executor, lambda state: self._end(begun, last.function(state)))
        return found

    def _begin(self, inputs: Sequence[Any]) -> list[Any]:
        outputs = self.outputs
        if outputs is None:
            self.inner.outputs = None
        else:
            wanted = dict(zip(self._shown, outputs, strict=True))
            count = len(self._shown) + len(self._states)
            self.inner.outputs = [wanted.get(position) for position in range(count)]
        sizes: dict[str, int] = {}
        batch = 1
        for port, item in zip(reversed(self._ports), reversed(inputs), strict=True):
            shape = np.shape(item)
            batch = shape[0] if item is not None and shape else batch
            sizes |= {str(dim): size for dim, size in zip(port.shape or (), shape, strict=False)}
        begun = list(inputs)
        for state in self._states:
            begun[state.input] = state.begin(sizes, batch)
        return begun

    def _end(self, begun: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        if self.cancel.wanted:  # the results may be incomplete; the request also refuses them
            raise RequestCancelledError("the request was cancelled while it ran")
        # The caller owns the results, and a state changes with later runs.
        shown = [results[position] for position in self._shown]
        shown = [item.copy() if is_growing(item) else item for item in shown]
        for state in self._states:  # last, because a copy may fail, and a failed run leaves them
            state.end(begun[state.input], results[state.output])
        return shown

    def profile(self) -> list[ProfileEntry]:
        return self.inner.profile()

    def sessions(self) -> dict[str, Session]:
        return self.inner.sessions()

    def states(self) -> dict[str, Array]:
        own = {s.port.name: s.initial({}, 0) if s.array is None else s.array for s in self._states}
        return {**own, **self.inner.states()}

    def set_states(self, states: Mapping[str, Array]) -> None:
        own = {state.port.name for state in self._states}
        # First the states of ops, which may refuse them.
        self.inner.set_states({name: array for name, array in states.items() if name not in own})
        for state in self._states:
            state.array, state.grows = states.get(state.port.name), True


class Stateful(RequestedModel, Protocol):
    """What `StatefulModel` needs of a compiled model beside what requests use."""

    graph: Graph

    @property
    def outputs(self) -> tuple[Port, ...]: ...
    @property
    def run_positions(self) -> Sequence[int]:
        """Positions of the inputs that a run gets, among all inputs."""
        ...

    def with_snapshot(self, bound: list[Any]) -> tuple[list[Any], Snapshot]:
        """Return the items of a run for one item of each input, and the run's snapshot."""
        ...


class StatefulModel:
    """A compiled model for requests that carry some of its outputs to inputs of the next run.

    Attributes:
        inputs: Ports of the inputs that callers provide.
        outputs: Ports of the outputs that callers get.
        ports: Ports of the inputs of a run.
        states: The states, without arrays.
        shown: Positions of `outputs` among the model's.
        owners: Names of the nodes that read states which no other node reads.
    """

    def __init__(self, model: Stateful, pairs: Mapping[str, str] | bool) -> None:
        """Connect outputs to inputs.

        Args:
            model: The model.
            pairs: The output for each input; True: all whose names differ in "past" and "present".

        Raises:
            ConfigError: There is no such pair, its dtypes differ, or something is listed twice.
        """
        self._model = model
        run = list(model.run_positions)
        self.ports = [model.inputs[position] for position in run]
        self.states = [
            CarriedState(model.inputs[first], run.index(first), second)
            for first, second in _paired(model, pairs)
        ]
        carried = {state.port.name for state in self.states}
        self.owners = _owners(model.graph, carried)
        last = {state.output for state in self.states}
        self.shown = [k for k in range(len(model.outputs)) if k not in last]
        self._provided = [k for k, port in enumerate(model.inputs) if port.name not in carried]
        self._signature = Signature(
            [model.inputs[k] for k in self._provided],
            [model.outputs[k] for k in self.shown],
            model.name,
        )
        self.inputs, self.outputs = self._signature.inputs, self._signature.outputs

    @property
    def name(self) -> str:
        """The model's name."""
        return self._model.name

    def next_request_id(self) -> int:
        """Return the number of a new request."""
        return self._model.next_request_id()

    def bind(self, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[list[Any], Snapshot]:
        """Check the arguments of a call; the items of states are None. See `CompiledModel.bind`."""
        whole: list[Any] = [None] * len(self._model.inputs)
        for position, item in zip(self._provided, self._signature.bind(args, named), strict=True):
            whole[position] = item
        return self._model.with_snapshot(whole)

    def wrap(self, results: Sequence[Any]) -> Results:
        """Return the results of a run by name and position."""
        return Results(self._signature.output_positions, results)

    def input_of_run(self, bound: Sequence[Any], position: int) -> Any:
        """Return the item of an input among those that `bind` returned; None if it was omitted."""
        return self._model.input_of_run(bound, self._provided[position])

    def preset(self, outputs: Sequence[Any] | None, key: str | int, array: Any) -> Any:
        """Return the arrays that receive the outputs, with one replaced."""
        position = self.shown[port_position(self.outputs, key, "output")]
        whole: list[Any] = [None] * len(self._model.outputs)
        for at, given in zip(self.shown, outputs or (), strict=False):
            whole[at] = given
        changed = self._model.preset(whole, position, array)
        return None if changed is None else [changed[at] for at in self.shown]

    def create_runner(self, cancel: Cancel) -> StatefulRunner:
        """Return a new runner, with the initial states."""
        return StatefulRunner(self._model.create_runner(cancel), self)

    def create_profiler(self) -> Runner:
        """Refuse to repeat a run, whose states are gone."""
        raise RequestError(
            f"a request of model {self.name!r} with states cannot repeat a run to measure it: "
            "compile the model with ENABLE_PROFILING"
        )

    def checked_stages(self, runner: Runner) -> list[Stage]:
        """Return the stages of an asynchronous run."""
        assert isinstance(runner, StatefulRunner), "`create_runner` made it"
        return runner.wrapped(self._model.checked_stages(runner.inner))

    def get_property(self, name: str) -> Any:
        """Return a property of the model."""
        return self._model.get_property(name)


def _owners(graph: Graph, names: Container[str]) -> list[str]:
    """Return the names of nodes that read inputs with these names, each of them alone and once."""
    owners: dict[Node, bool] = {}
    for value in graph.inputs:
        if value.name in names:
            alone = len(value.uses) == 1 and not graph.is_output(value)
            for node in value.consumers:
                owners[node] = owners.get(node, True) and alone
    return [node.name for node, owns in owners.items() if owns]


def _paired(model: Stateful, pairs: Mapping[str, str] | bool) -> list[tuple[int, int]]:
    """Return the positions of the input and the output of each state, checked."""
    if isinstance(pairs, bool):
        outputs = {_plain_name(port.name, "present"): port.name for port in model.outputs}
        names = [port.name for port in model.inputs if "past" in port.name]
        pairs = {
            name: outputs[key] for name in names if (key := _plain_name(name, "past")) in outputs
        }
        if not pairs:
            shown = ", ".join(port.name for port in (*model.inputs, *model.outputs))
            raise ConfigError(
                f"model {model.name!r} has no inputs 'past...' with outputs 'present...'; list the "
                f"states, as in states={{input: output}}. It has {shown}"
            )
    if not isinstance(pairs, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"states are a dict, the output for each input, or True; got {pairs!r}")
    found: list[tuple[int, int]] = []
    for name, result in pairs.items():
        first = port_position(model.inputs, name, "input")
        second = port_position(model.outputs, result, "output")
        port, output = model.inputs[first], model.outputs[second]
        if not isinstance(port.type, TensorType) or port.shape is None or port.default is not None:
            raise ConfigError(
                f"input {port} cannot be a state: it is no tensor of known rank without a default"
            )
        if output.type is not None and output.dtype != port.dtype:
            raise ConfigError(f"input {port} cannot be the state of output {output}: dtypes differ")
        if any(first == a or second == b for a, b in found):
            raise ConfigError(f"input {port.name!r} or output {output.name!r} is in two states")
        found.append((first, second))
    return found


def _plain_name(name: str, word: str) -> str:
    """Return what the names of a cached input and output have in common."""
    return re.sub("_key_values?", "", name).replace(word, "*", 1)

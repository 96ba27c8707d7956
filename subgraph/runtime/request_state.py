"""States of a request: arrays that stateful subgraph ops carry from one run to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from subgraph.errors import ModelError, RequestError
from subgraph.graph.types import Array
from subgraph.runtime.runner import Runner
from subgraph.system.registry import nearest


class RequestState:
    """One state of a request, made by ``request.query_state``; the request must not be busy.

    Attributes:
        name: Name of the subgraph node and the op's name of the state, as in "lstm_0/hidden".
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
        # Only the ops know their initial states: all are reset, the initial one is read, and the
        # others are set again.
        runner.set_states({})
        first = runner.states()
        states.pop(self.name, None)
        if self.name in first:
            states[self.name] = first[self.name]
        if states:
            runner.set_states(states)

    def _found(self) -> Array:
        self._check_idle()
        states = self._runner.states()
        if self.name not in states:
            raise RequestError(f"state {self.name!r} is gone; {nearest(self.name, states)}")
        return states[self.name]

    def __repr__(self) -> str:
        return f"<RequestState {self.name!r}>"

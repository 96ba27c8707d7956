"""States of a request: what stateful subgraph ops keep from one of its runs to the next."""

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
        name: The subgraph node and the op's own name of the state, as in "lstm_0/hidden".
    """

    def __init__(self, name: str, runner: Runner, check_idle: Callable[[], None]) -> None:
        """Offer a state of the ops that ``runner`` runs.

        Args:
            name: Its name.
            runner: What runs the request.
            check_idle: Raises if the request is busy.
        """
        self.name = name
        self._runner = runner
        self._check_idle = check_idle

    @property
    def state(self) -> Array:
        """A copy of the array from which the next run goes on; assign to it to change that.

        Raises:
            RequestError: the request is busy, or the op has dropped the state.
            ModelError: an array is assigned that has another dtype or number of dimensions.
            DeviceError: the op does not go on from the array that is assigned.
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
        """Let the next run begin with the state as it is at first; other states stay.

        Raises:
            RequestError: the request is busy.
        """
        self._check_idle()
        runner = self._runner
        states = runner.states()
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

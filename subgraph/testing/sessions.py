"""Sessions with other methods, by which the checks count the calls of ops or make them fail."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from subgraph.operators import subgraph_op
from subgraph.operators.subgraph_op import Session, SubgraphOp


@contextmanager
def changed_sessions(
    chosen: Callable[[SubgraphOp], bool], methods: Callable[[type[Session]], dict[str, Any]]
) -> Generator[None]:
    """Give sessions that are opened in the ``with`` block other methods.

    Args:
        chosen: Whether the sessions of an op are changed.
        methods: Returns the methods by name for a class of sessions.
    """
    made: dict[type[Session], type[Session]] = {}
    opened = subgraph_op.open_own

    def open_own(op: SubgraphOp) -> Session:
        session = opened(op)
        if chosen(op):
            kind = type(session)
            if kind not in made:
                # Python looks ``__call__`` up in the class, so the class of the session changes.
                # Without slots of its own the new class has the layout of the old one, which the
                # assignment below needs.
                made[kind] = type(kind.__name__, (kind,), {"__slots__": (), **methods(kind)})
            session.__class__ = made[kind]
        return session

    with (
        patch.object(subgraph_op, "open_own", open_own),
        # This module has imported the function under its own name.
        patch("subgraph.devices.fallback.open_own", open_own),
    ):
        yield

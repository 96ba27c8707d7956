"""`Cancel`: ends the run of a request early, from any thread."""

from __future__ import annotations

from subgraph.operators.subgraph_op import Session


class Cancel:
    """A flag that several executors of one request read between steps.

    Attributes:
        wanted: Whether the run is to end.
        sessions: Sessions that can end a run in the middle of a step.
    """

    __slots__ = ("sessions", "wanted")

    def __init__(self) -> None:
        """Begin without a request to cancel."""
        self.wanted = False
        self.sessions: list[Session] = []

    def watch(self, session: Session) -> None:
        """Forward requests to a session, including one that was made before."""
        self.sessions.append(session)
        if self.wanted:
            session.cancel()

    def request(self) -> None:
        """End the run before its next step, or before the next inner step of a session."""
        self.wanted = True
        for session in self.sessions:
            session.cancel()

    def reset(self) -> None:
        """Begin a new run; must not be called during a run, which would then miss a request."""
        if self.wanted:
            self.wanted = False
            for session in self.sessions:
                session.resume()

"""`Cancel`: ends the run of a request early, from any thread."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from subgraph.operators.subgraph_op import Session


class Cancel:
    """A flag of one request that all its executors read between steps.

    Attributes:
        wanted: Whether the run has to end.
        sessions: Sessions that can end a run within a step.
    """

    __slots__ = ("sessions", "wanted")

    def __init__(self) -> None:
        """Create a flag that is not set."""
        self.wanted = False
        self.sessions: list[Session] = []

    def watch(self, session: Session) -> None:
        """Cancel a session whenever the flag is set; at once if it is set already."""
        # The session is listed before the flag is read, and `request` sets the flag before it reads
        # the list: a session that opens meanwhile is cancelled by one of the two.
        self.sessions.append(session)
        if self.wanted:
            session.cancel()

    @contextmanager
    def replaced_sessions(self) -> Generator[None]:
        """Watch only the sessions that the block opens; after an error those from before it.

        The list alone would keep the memory of sessions that the request has left.
        """
        before, self.sessions = self.sessions, []
        try:
            yield
        except BaseException:  # an interrupt, too: the request goes on with its old sessions
            self.sessions = before
            raise

    def request(self) -> None:
        """End the run before its next step, or before the next inner step of a session."""
        self.wanted = True
        for session in self.sessions:
            session.cancel()

    def reset(self) -> None:
        """Clear the flag for a new run. A call during a run would lose a request to cancel."""
        if self.wanted:
            self.wanted = False
            for session in self.sessions:
                session.resume()

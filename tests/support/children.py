"""Checks in forked children: of another user, or within a time."""

from __future__ import annotations

import faulthandler
import os
import traceback
from collections.abc import Callable


def in_child(
    check: Callable[[], None], *, user: int | None = None, seconds: float | None = None
) -> None:
    """Fail unless ``check`` passes in a forked child.

    Args:
        check: The check; what it raises is printed by the child.
        user: Number of the user and group that the child becomes, which needs the rights of root;
            None: the user of the test.
        seconds: Time after which the child ends with the stacks of its threads; None: never.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if seconds is not None:
                faulthandler.dump_traceback_later(seconds, exit=True, file=2)  # standard error
            if user is not None:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            check()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

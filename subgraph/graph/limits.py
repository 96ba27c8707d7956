"""Budgets: how much memory, how many nodes and how much time a model may take.

A request that exceeds a budget raises `LimitError` before memory is allocated or work done. The
budgets in force are those of the innermost `limited` block of this thread, else the environment
variable ``SUBGRAPH_MEMORY_LIMIT``, else the defaults. ``sg.load`` and the devices' options
``MEMORY_LIMIT``, ``NODE_LIMIT`` and ``COMPILE_TIMEOUT`` open such blocks.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeGuard

from subgraph.errors import ConfigError, LimitError
from subgraph.graph.result_arrays import is_array
from subgraph.graph.symbolic import plain
from subgraph.graph.types import TensorType, numpy_dtype
from subgraph.system.control_groups import group_files
from subgraph.system.environment import Variable

# Nodes that the expansion of functions may add. The functions of the benchmarks' models expand to
# some thousands at most.
NODES = 1 << 18
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
# Live values are counted again after allocations of 1/16 of the memory budget (estimate).
_COUNT_EVERY = 16
ARRAY_OBJECT_BYTES = 128  # bytes of an array object beside its elements (estimate)
MAX_UNCOUNTED_BYTES = 1 << 16  # allocations below this are not compared with a budget (estimate)


class _State(threading.local):
    """The budgets of a thread, and the values that its runs hold.

    Attributes:
        memory: Bytes that may be live at one time; 0: the process's budget.
        nodes: Nodes that expansions may add; 0: `NODES`.
        seconds: Time allowed for loading or compiling, for messages.
        deadline: `time.monotonic` at which that time ends.
        live: Lists of values of the runs of this thread, the innermost last.
        allocated: Bytes allocated since `live` was counted.
    """

    memory = 0
    nodes = 0
    seconds = 0.0
    deadline = math.inf
    allocated = 0.0

    def __init__(self) -> None:
        self.live: list[list[Any]] = []


_state = _State()


_BYTES = "a positive number of bytes such as '8G', '512M' or '1073741824'"


def parse_bytes(text: str, where: str) -> int:
    """Return the number of bytes of a text such as "512M" or "1.5 GiB"; 0 for "".

    Args:
        text: A number, optionally followed by K, M, G or T (powers of 1024) and by "B" or "iB".
        where: The option or variable that holds the text, for the message.

    Raises:
        ConfigError: the text is not a positive number of bytes.
    """
    if not text.strip():
        return 0
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    count = int(float(found[1]) * _UNITS[found[2].upper()]) if found else 0
    if count <= 0:
        raise ConfigError(f"{where} is {text!r}; it takes {_BYTES}")
    return count


MEMORY_LIMIT = Variable("SUBGRAPH_MEMORY_LIMIT", 0, lambda text: parse_bytes(text, "it"), _BYTES)


@contextmanager
def limited(memory: int = 0, nodes: int = 0, seconds: float = 0.0) -> Generator[None]:
    """Set the budgets of this thread inside a ``with`` block.

    Args:
        memory: Bytes that may be live at one time; 0: as outside the block.
        nodes: Nodes that expansions may add; 0: as outside the block.
        seconds: Time for loading or compiling; 0: as outside. It never extends an outer deadline.
    """
    before = (_state.memory, _state.nodes, _state.seconds, _state.deadline)
    _state.memory = memory or _state.memory
    _state.nodes = nodes or _state.nodes
    # A compilation that is given a path loads the model, which must not give it more time.
    if seconds and time.monotonic() + seconds < _state.deadline:
        _state.seconds, _state.deadline = seconds, time.monotonic() + seconds
    try:
        yield
    finally:
        _state.memory, _state.nodes, _state.seconds, _state.deadline = before


def budgets() -> tuple[int, int, float]:
    """Return this thread's budgets as arguments of `limited`, for a thread that helps it."""
    left = _state.deadline - time.monotonic()
    # For `limited` 0 means no limit, so a deadline that has passed becomes a nanosecond.
    return _state.memory, _state.nodes, 0.0 if math.isinf(left) else max(left, 1e-9)


# ------------------------------------------------------------------ time


def check_time(doing: str) -> None:
    """Raise if the time for loading or compiling is over.

    Args:
        doing: The work in progress, for the message.

    Raises:
        LimitError: the deadline has passed.
    """
    if time.monotonic() > _state.deadline:
        raise LimitError(
            f"{doing}: the time of {_state.seconds:g} s is over; raise COMPILE_TIMEOUT (of a "
            "load: timeout=), or simplify the model"
        )


# ------------------------------------------------------------------ nodes


def check_nodes(added: int, what: str) -> None:
    """Raise if an expansion adds more nodes than the budget.

    Args:
        added: Number of nodes that the expansion adds to a graph.
        what: The expanded function, for the message.

    Raises:
        LimitError: the number exceeds the budget.
    """
    most = _state.nodes or NODES
    if added > most:
        raise LimitError(
            f"{what} gives {added} nodes; the budget is {most}: raise NODE_LIMIT (of a load: "
            "node_limit=) if the model can be trusted"
        )


# ------------------------------------------------------------------ memory


@cache
def machine_memory() -> int:
    """Return the bytes that this process may use: the least of RAM, control groups and rlimit."""
    try:
        import resource

        limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
        allowed = resource.getrlimit(resource.RLIMIT_AS)[0]
    except (ImportError, OSError, ValueError):
        # 64 GiB where the system does not say, as on Windows. An estimate.
        return 1 << 36
    # "No limit" (RLIM_INFINITY) is -1.
    if allowed > 0:
        limits.append(allowed)
    limits += [int(said) for said in map(str.strip, group_files("memory.max")) if said.isdigit()]
    return min(limits)


def memory_limit() -> int:
    """Return the budget for live values in bytes; by default half of `machine_memory`.

    Weights that are mapped from a file do not count.
    """
    return _state.memory or MEMORY_LIMIT.value() or machine_memory() // 2


def check_memory(wanted: float, what: str) -> None:
    """Raise if an allocation does not fit into the budget beside the values of this thread's runs.

    The values are counted only if much was allocated since the last count that fitted, so that a
    run which goes on after a refusal is refused again.

    Args:
        wanted: Bytes to allocate; they may be symbolic.
        what: The operator or plan that allocates, for the message.

    Raises:
        LimitError: the budget is exceeded.
    """
    most = memory_limit()
    exceeds = wanted > most  # of a symbolic number this is a guard: larger ones are checked anew
    wanted = plain(wanted)
    allocated = _state.allocated = _state.allocated + wanted
    if allocated <= MAX_UNCOUNTED_BYTES or allocated * _COUNT_EVERY <= most:
        return
    # A request above the whole budget fails without a count of what is held.
    held = 0 if exceeds else _held()
    if wanted + held > most:
        beside = f" beside the {_shown(held)} that are held" if held else ""
        raise _exceeded(f"{what} asks for {_shown(wanted)}{beside}")
    _state.allocated = 0.0


def _exceeded(what: str) -> LimitError:
    return LimitError(
        f"{what}; the budget is {_shown(memory_limit())}, by default half of the memory: set "
        f"MEMORY_LIMIT or {MEMORY_LIMIT.name} if the model can be trusted"
    )


def _shown(count: float) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 1 << 27 else f"{count / 2**20:,.2f} MiB"


def enter_run(values: list[Any]) -> None:
    """Count the elements of ``values``, as they are at each count, until `leave_run`."""
    _state.live.append(values)


def leave_run() -> None:
    """End the innermost `enter_run`."""
    _state.live.pop()


def count_results(results: Iterable[Any], what: str) -> None:
    """Add the outputs of an operator to the allocated bytes; from time to time check the budget.

    Args:
        results: The operator's outputs.
        what: The operator, for the message.

    Raises:
        LimitError: the values of this thread's runs exceed the budget.
    """
    results = list(results)
    sizes = (ARRAY_OBJECT_BYTES + _size_of(result) for result in results)
    allocated = _state.allocated = _state.allocated + sum(sizes)
    if allocated > MAX_UNCOUNTED_BYTES and allocated * _COUNT_EVERY > memory_limit():
        held = _held(results)
        if held > memory_limit():
            raise _exceeded(f"{what}: {_shown(held)} are held after it")
        _state.allocated = 0.0


def _held(more: Iterable[Any] = ()) -> int:
    """Return the bytes of the values of this thread's runs and of ``more``.

    Memory that several views share counts once. Weights and constants are read-only and do not
    count.
    """
    found: dict[int, int] = {}
    work: list[Any] = [*_state.live, *more]
    while work:
        value = work.pop()
        if _is_container(value):
            if id(value) not in found:
                # A container holds a pointer of 8 bytes for each item. One that was met before is
                # skipped, which also ends circles.
                found[id(value)] = 8 * len(value)
                work.extend(value.values() if hasattr(value, "values") else value)
        elif is_array(value):
            # All views of one array lead to the array that owns the memory.
            while is_array(value.base):
                value = value.base
            found[id(value)] = ARRAY_OBJECT_BYTES + (
                _size_of(value) if value.flags.writeable else 0
            )
    return sum(found.values())


def _size_of(value: Any) -> int:
    """Return the bytes of an array, including those of its strings; 0 for any other value."""
    if not is_array(value):
        return 0
    count = int(value.nbytes)
    if value.dtype == object:
        count += sum(map(len, value.reshape(-1).tolist()))
    return count


def _is_container(value: object) -> TypeGuard[Any]:
    return isinstance(value, (list, tuple, dict))


def size_in_bytes(type_: TensorType) -> int:
    """Return the bytes of a value of this type; a dimension that is not a number counts as 1."""
    return math.prod(type_.sizes) * numpy_dtype(type_.dtype).itemsize

"""The memory layout of programs, run blocks and pools, which Python and the compiled walker share.

All words are int64; the constants are byte offsets.
"""

from __future__ import annotations

from typing import Final

WORD: Final = 8
LINE: Final = 128  # two cache lines: neighbours are prefetched in pairs

# One row of a program.
ROW_KERNEL: Final = 0
ROW_ARGS: Final = 8
ROW_UNITS: Final = 16
ROW_GRAIN: Final = 24  # least units of a piece; 0: the step stays on one thread
BRANCH_GRAIN: Final = -1  # so marked, a step says how many of the rows after it are skipped
ROW_WORDS: Final = 4

# The words of a step that skips rows: the address of a byte that is 0 where a condition does not
# hold, whether the rows are those to run when it holds, and, written, how many of them to skip.
BRANCH_CONDITION: Final = 0
BRANCH_WHEN: Final = 8
BRANCH_SKIP: Final = 16

# What one run is told.
RUN_ROWS: Final = 0
RUN_STEPS: Final = 8
RUN_POOL: Final = 16  # address of a pool's state, 0 for none
RUN_THREADS: Final = 24
RUN_CANCEL: Final = 32  # address of a word that is not 0 once the run is to stop
RUN_TIMES: Final = 40  # address of two words (start, end in ns) per step, 0 for none
RUN_STATUS: Final = 48  # written: 0 finished, 1 cancelled
RUN_RELEASE: Final = 56  # 0: keep Python's lock during the run
RUN_WALK: Final = 64  # address of the walker
RUN_WORDS: Final = 9

# A run block of turns (`subgraph.engine.region.iterations`): a program again and again. RUN_STATUS
# is written:
# 0 for all turns asked for, 1 cancelled, 2 ended by the condition.
ITERATIONS_INNER: Final = 0  # address of the program's own run block
ITERATIONS_LIMIT: Final = 8  # number of the turn before which to stop
ITERATIONS_DONE: Final = 16  # read and written: turns made
ITERATIONS_NUMBER: Final = 24  # address of a word that takes the number of a turn
ITERATIONS_CONDITION: Final = 32  # address of a byte that is 0 after the last turn; 0 for none
ITERATIONS_BEFORE: Final = 72  # copies before each turn: where their rows begin, and how many
ITERATIONS_AFTER: Final = 88  # copies after each turn
TURNS_WORDS: Final = 13

# A copy: source, target, bytes, and by how much source and target move on from turn to turn.
COPY_SOURCE: Final = 0
COPY_TARGET: Final = 8
COPY_BYTES: Final = 16
COPY_WORDS: Final = 5

# A step that fits a program to sizes which its data decide
# (`subgraph.engine.program.size_kernels`): where the numbers go that it reads, how many, their
# bytes; the word that ends the run; the rows of its code (operation, target, two operands; all but
# the first are addresses, a guard's target is what must come out) and of patches (target, source,
# what holds an address to add or 0).
SIZE_READ: Final = 0
SIZE_COUNT: Final = 8
SIZE_ITEM: Final = 16
SIZE_STOP: Final = 24
SIZE_CODE: Final = 32
SIZE_PATCHES: Final = 48
SIZE_WORDS: Final = 8
SIZE_CODE_WORDS: Final = 4
SIZE_PATCH_WORDS: Final = 3
# Operations on integers, the conversion to float, operations on floats (f...), and comparisons.
# They are named like those of `subgraph.graph.size_expressions`.
SIZE_OPERATIONS: Final = (
    *("add", "sub", "mul", "floordiv", "mod", "max", "min", "abs", "and", "or", "xor"),
    *("lshift", "rshift", "invert", "float"),
    *("fadd", "fsub", "fmul", "ftruediv", "fmax", "fmin", "fabs"),
    *("fceil", "ffloor", "ftrunc", "fsingle", "eq", "lt", "le", "feq", "flt", "fle"),
)
MISFIT: Final = 2  # in the word that ends a run: the sizes are not those of the program

# A pool's state. What different threads write stands on different lines.
POOL_SEQUENCE: Final = 0 * LINE  # counts published steps; helpers wait for it to change
POOL_STOP: Final = 0 * LINE + 8
POOL_SLEEPERS: Final = 1 * LINE
POOL_REMAINING: Final = 2 * LINE  # slices of the published step that are not done
POOL_BUSY: Final = 3 * LINE  # 1 while a walker has a step published
POOL_WALKERS: Final = 3 * LINE + 8  # programs running on this pool
POOL_KERNEL: Final = 4 * LINE
POOL_ARGS: Final = 4 * LINE + 8
POOL_UNITS: Final = 4 * LINE + 16
POOL_SLICE: Final = 4 * LINE + 24  # units of a slice
POOL_LEAST: Final = 4 * LINE + 32  # least slices to take
POOL_SIZE: Final = 5 * LINE  # helpers + 1
POOL_SPINS: Final = 5 * LINE + 8  # pauses before a helper sleeps
# Sets of cores, a bit each, as the operating system takes them: those on which the last caller that
# woke helpers may run, and the same without the one it ran on.
POOL_CORES: Final = 6 * LINE
POOL_OTHER_CORES: Final = 7 * LINE
POOL_TICKETS: Final = 8 * LINE  # one line each
# Where in its line a helper says which thread it is, and whether it sleeps: 1, or 2 once the caller
# that wakes it has told it to wake on POOL_OTHER_CORES.
POOL_THREAD: Final = 64
POOL_ASLEEP: Final = 72

# A ticket: threads << 52 | slices << 26 | next slice.
TICKET_BITS: Final = 26
TICKET_MASK: Final = (1 << TICKET_BITS) - 1
MAX_THREADS: Final = 1024


def pool_bytes(size: int) -> int:
    """Return the bytes of the state of a pool with that many threads, the caller included."""
    return POOL_TICKETS + size * LINE

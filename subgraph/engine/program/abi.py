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
ROW_GRAIN: Final = 24  # least units of a piece; 0: the step runs on one thread
BRANCH_GRAIN: Final = -1  # the grain of a step that decides how many of the next rows are skipped
ROW_WORDS: Final = 4

# The arguments of a step that skips rows: address of the condition's byte (0 for false), the value
# of the condition for which the rows run, and, written by the step, how many rows to skip.
BRANCH_CONDITION: Final = 0
BRANCH_WHEN: Final = 8
BRANCH_SKIP: Final = 16

# The run block: the arguments of one run.
RUN_ROWS: Final = 0
RUN_STEPS: Final = 8
RUN_POOL: Final = 16  # address of a pool's state, 0 for none
RUN_THREADS: Final = 24
RUN_CANCEL: Final = 32  # address of a word; the run stops before the next step once it is not 0
RUN_TIMES: Final = 40  # address of two words (start, end in ns) per step, 0 for none
RUN_STATUS: Final = 48  # written: 0 finished, 1 cancelled
RUN_RELEASE: Final = 56  # 0: hold Python's lock during the run
RUN_WALK: Final = 64  # address of the walker
RUN_WORDS: Final = 9

# The run block of iterations (`subgraph.engine.cpu.iterations`), which run a program repeatedly.
# RUN_STATUS is written: 0 the limit is reached, 1 cancelled, 2 ended by the condition.
ITERATIONS_INNER: Final = 0  # address of the program's own run block
ITERATIONS_LIMIT: Final = 8  # number of the iteration before which to stop
ITERATIONS_DONE: Final = 16  # read and written: finished iterations
ITERATIONS_NUMBER: Final = 24  # address of a word that receives the number of an iteration
ITERATIONS_CONDITION: Final = 32  # address of a byte, 0 after the last iteration; 0 for none
ITERATIONS_BEFORE: Final = 72  # copies before each iteration: address of their rows, and count
ITERATIONS_AFTER: Final = 88  # copies after each iteration, alike
ITERATIONS_WORDS: Final = 13

# A copy: source, target, bytes, and the bytes by which source and target advance per iteration.
COPY_SOURCE: Final = 0
COPY_TARGET: Final = 8
COPY_BYTES: Final = 16
COPY_WORDS: Final = 5

# The block of a step that reads numbers which decide sizes
# (`subgraph.engine.program.size_kernels`): address for the numbers, their count, bytes of each;
# address of the word that ends the run; rows of code (operation, target, two operands: all but the
# operation are addresses, except that the target of a comparison is its required outcome); rows of
# patches (address of the target, of the source, and of a base that is added, or 0).
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
MISFIT: Final = 2  # in the word that ends a run: the program does not serve the sizes

# A pool's state. Words that different threads write are on different cache lines.
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
# Bit sets of cores in the operating system's format: the cores on which the last caller that woke
# helpers may run, and those without the core on which it ran.
POOL_CORES: Final = 6 * LINE
POOL_OTHER_CORES: Final = 7 * LINE
POOL_TICKETS: Final = 8 * LINE  # one line each
# In the line of a helper: its thread's identifier, and whether it sleeps: 1, or 2 once a caller has
# restricted it to POOL_OTHER_CORES to wake it there.
POOL_THREAD: Final = 64
POOL_ASLEEP: Final = 72

# A ticket: threads << 52 | slices << 26 | next slice.
TICKET_BITS: Final = 26
TICKET_MASK: Final = (1 << TICKET_BITS) - 1
MAX_THREADS: Final = 1024


def pool_bytes(size: int) -> int:
    """Return the bytes of the state of a pool with that many threads, the caller included."""
    return POOL_TICKETS + size * LINE

"""The memory layout of programs, run blocks and pools, shared by Python and compiled code.

All words are int64. The constants are offsets in bytes from the begin of a structure, ``*_WORDS``
its size in words.
"""

from __future__ import annotations

from typing import Final

WORD: Final = 8  # bytes
LINE: Final = 128  # bytes: two cache lines, since x86 prefetches the neighbour of a line, too

# One row of a program: a step.
ROW_KERNEL: Final = 0  # address of the kernel
ROW_ARGS: Final = 8  # address of its arguments
ROW_UNITS: Final = 16  # number of work units
ROW_GRAIN: Final = 24  # least units that a thread takes; 0: the step runs on the caller's thread
BRANCH_GRAIN: Final = -1  # the grain of a branch step: the walker then skips BRANCH_SKIP rows
ROW_WORDS: Final = 4

# The arguments of a branch step (`branch_kernels`), which stands before the rows of one branch.
BRANCH_CONDITION: Final = 0  # address of the condition, a byte; 0 is false
BRANCH_WHEN: Final = 8  # 1 if the rows run for true, 0 if they run for false
BRANCH_SKIP: Final = 16  # written by the step: how many of the next rows to skip

# The run block: the arguments of one run of a program.
RUN_ROWS: Final = 0  # address of the program's rows
RUN_STEPS: Final = 8  # number of rows
RUN_POOL: Final = 16  # address of a pool's state, 0 for none
RUN_THREADS: Final = 24  # most threads of a step, the caller included
RUN_CANCEL: Final = 32  # address of a word; the run stops before the next step once it is not 0
RUN_TIMES: Final = 40  # address of two words per step for its start and end in ns; 0 for none
RUN_STATUS: Final = 48  # written by the walker: 0 finished, 1 stopped by the word at RUN_CANCEL
RUN_RELEASE: Final = 56  # 1 to release Python's lock during the run, 0 to hold it
RUN_WALK: Final = 64  # address of the walker, the function that `entry` calls
RUN_WORDS: Final = 9

# The block of a loop (`iteration_kernels`), which runs a program repeatedly. `entry` calls it as a
# run block, so RUN_STATUS, RUN_RELEASE and RUN_WALK have their meaning and the other words do not.
# The status: 0 the limit is reached, 1 cancelled, 2 ended by the condition.
ITERATIONS_INNER: Final = 0  # address of the program's own run block
ITERATIONS_LIMIT: Final = 8  # index of the iteration before which the loop stops
ITERATIONS_DONE: Final = 16  # read and written: index of the next iteration
ITERATIONS_NUMBER: Final = 24  # address of a word that receives the index of each iteration
ITERATIONS_CONDITION: Final = 32  # address of a byte; the loop ends once it is 0. 0: no condition
ITERATIONS_BEFORE: Final = 72  # two words: address and number of the copies before an iteration
ITERATIONS_AFTER: Final = 88  # two words: address and number of the copies after an iteration
ITERATIONS_WORDS: Final = 13

# One copy of a loop. After it the source and the target advance.
COPY_SOURCE: Final = 0  # address
COPY_TARGET: Final = 8  # address
COPY_BYTES: Final = 16  # then two words: bytes by which source and target advance per iteration
COPY_WORDS: Final = 5

# A pool's state. Words that different threads write are on different cache lines. See
# `walker_kernels` for the protocol.
POOL_SEQUENCE: Final = 0 * LINE  # counts published steps; helpers wait for it to change
POOL_STOP: Final = 0 * LINE + 8  # 1 to end the helpers
POOL_SLEEPERS: Final = 1 * LINE  # number of helpers that sleep on a futex, or are about to
POOL_REMAINING: Final = 2 * LINE  # slices of the published step that are not finished
POOL_BUSY: Final = 3 * LINE  # 1 while a walker has a step published
POOL_WALKERS: Final = 3 * LINE + 8  # number of programs that run on this pool
POOL_KERNEL: Final = 4 * LINE  # the published step: its kernel,
POOL_ARGS: Final = 4 * LINE + 8  # the address of its arguments,
POOL_UNITS: Final = 4 * LINE + 16  # its work units,
POOL_SLICE: Final = 4 * LINE + 24  # units of a slice,
POOL_LEAST: Final = 4 * LINE + 32  # and the least slices that a thread takes
POOL_SIZE: Final = 5 * LINE  # threads: the helpers and the caller
POOL_SPINS: Final = 5 * LINE + 8  # pause instructions after the last step before a helper sleeps
# Bit sets of cores (Linux's cpu_set_t): those on which the last caller that woke helpers may run,
# and the same without the core on which it ran.
POOL_CORES: Final = 6 * LINE
POOL_OTHER_CORES: Final = 7 * LINE
POOL_TICKETS: Final = 8 * LINE  # one line per thread; its first word is the ticket of its region
# Further words in the line of a helper.
POOL_THREAD: Final = 64  # the operating system's identifier of its thread
POOL_ASLEEP: Final = 72  # 1 while it sleeps; 2 once a caller has moved it to POOL_OTHER_CORES

# A ticket: threads << 52 | slices << 26 | next slice.
TICKET_BITS: Final = 26
TICKET_MASK: Final = (1 << TICKET_BITS) - 1
# Most threads of a pool, a round number that the 11 bits of a ticket above the slices can hold.
MAX_THREADS: Final = 1024


def pool_bytes(size: int) -> int:
    """Return the bytes of the state of a pool of ``size`` threads, the caller included."""
    return POOL_TICKETS + size * LINE

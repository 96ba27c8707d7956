"""Programs at run time: rows of steps, the walker that runs them, the thread pool, reports.

`program` builds the rows, `abi` is the memory layout shared with compiled code, `walker_kernels`
runs them and distributes steps over the threads of a `pool`, `entry` makes a run callable from
Python. `branch_kernels` and `iteration_kernels` are the control flow of programs.
"""

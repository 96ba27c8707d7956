"""The execution engine: compiled kernels, their cache, the thread pool and the programs they run.

Nothing is imported here: ``import subgraph`` must stay free of numba and llvmlite.
"""

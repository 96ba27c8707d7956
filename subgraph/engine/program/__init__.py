"""Programs at run time: steps, the thread pool, the memory of results, reports of kernels."""

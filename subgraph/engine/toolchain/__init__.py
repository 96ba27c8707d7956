"""The toolchain: from a kernel factory to machine code, and the cache of compiled kernels."""

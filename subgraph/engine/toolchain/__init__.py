"""The toolchain: compiles a kernel's variant to machine code, caches the code, and loads it.

`kernel` names a compiled function, `toolchain` finds or compiles its code, `keys` computes its
cache key, `compiler` drives numba and LLVM, `objectfile` and `loader` link and map object code,
and `prebuilt` reads the kernels that were compiled ahead for the `isa_levels`.
"""

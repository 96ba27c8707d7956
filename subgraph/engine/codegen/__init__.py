"""Code generation: what CPU kernels are written with, as numba intrinsics over LLVM IR.

`simd` has the building blocks of kernels (memory, vectors, atomics), made of `irtools`;
`arguments` and `argument_views` declare and read argument blocks. `tile`, `strip`, `panel` and
`tile_int` are register tiles, which emit IR through `emit`; `tiling` describes them to planning
code. `vmath` has elementary functions, `transpose` and `dot` shuffles and byte products.
"""

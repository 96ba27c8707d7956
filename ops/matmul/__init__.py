"""Matrix products (MatMul, Gemm, the fused form, Einsum's rules), and determinants.

`cpu` packs B into panels and emits the blocked GEMM of `kernels`. `integer_gemm_cpu` multiplies
integers that are computed at run time; products of quantized weights are in
`subgraph.ops.quantized`.
"""

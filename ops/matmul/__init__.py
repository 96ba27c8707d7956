"""Matrix products (MatMul, Gemm, the fused form, Einsum's rules), and determinants.

`cpu` packs B into panels and emits the blocked GEMM of `kernels`, or Strassen's product
(`strassen_cpu`, `strassen_kernels`) for large weights. `integer_gemm_cpu` multiplies integers that
are computed at run time; products of quantized weights are in `subgraph.ops.quantized`.
"""

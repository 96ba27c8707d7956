"""Parts of kernels and lowerings that several families share.

- `strides`: broadcasting and merging of dimensions
- `tile_planning`: contraction tiles, division of work
- `activations`, `activation_kernels`: what fused nodes apply to their results
- `opencl_code`: C text of OpenCL kernels
- `delegation`: use of another operator's lowering
- `half_precision`: references that sum float16 and bfloat16
"""

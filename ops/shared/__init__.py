"""Parts of kernels and lowerings that several families share.

- `strides`: broadcasting and merging of dimensions
- `tile_planning`, `activation_kernels`: contraction tiles, activations, division of work
- `range_check_cpu`, `range_check_kernels`: checks of indices and counts at run time
- `opencl_code`: C text of OpenCL kernels
- `required`: the operator that checks operands for operators expanded by a pass
"""

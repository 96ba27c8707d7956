"""Views and operators that move elements, and the layouts and packed weights of other families.

- `op`, `operands`, `reference`, `cpu`, `opencl`: the operators (Transpose, Slice, Concat, Pad, ...)
- `copies_cpu`, `tables_cpu`, `kernels`: strided copies, fills and selections by tables, as steps
- `layout_conversion`, `reorder_kernels`: between the plain layout and blocks of channels
- `geometry`, `window_arguments`, `window_opencl` (`windows.cl`): sizes of convolutions and pooling
- `packing`, `packing_kernels`: weights as kernels read them
"""

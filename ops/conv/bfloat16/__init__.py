"""Direct convolution over matrix tiles of bfloat16: the input is rounded first, then multiplied.

`cpu` emits the two steps, `image` the first one of plain images of few channels; their kernels are
in `kernels`. Sums are float32.
"""

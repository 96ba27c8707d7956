"""Direct convolution over matrix tiles of bfloat16: the input is rounded first, then multiplied.

`cpu` emits the two steps, whose kernels are in `kernels`; sums and results are float32.
"""

"""Convolutions: direct, Winograd, depthwise and transposed.

`choice` picks the algorithm of a convolution (`job`) by estimated cycles, `cpu` emits its steps:

- `direct`, `kernels`, `direct_tile_kernels`, `copy_kernels`: direct convolution over contraction
  tiles, input copies
- `winograd`, `winograd_kernels`, `winograd_tile_kernels`: Winograd's
- `polyphase`: strided convolutions of few channels, for Winograd's algorithm
- `depthwise`, `depthwise_kernels`: single channels and small groups
- `generic_kernels`: everything else, in the plain layout
- `transpose_cpu`: ConvTranspose, by convolutions of its phases or by products

Sizes and packed weights (`Geometry`), and the operands of a step (`PackedConv`), are in
`subgraph.ops.movement`; convolutions of integers, in `subgraph.ops.quantized`, use sizes and
weights, too.
"""

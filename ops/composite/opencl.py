"""Composed operators on OPENCL: the CPU's lowerings, whose parts have kernels of other families."""

from __future__ import annotations

from subgraph.opencl.lowering import cl_shared

cl_shared("BitCast", "Einsum", "Hardmax", "MeanVarianceNormalization")

"""Convolutions: direct, Winograd, depthwise, transposed; floats and bytes share the geometry."""

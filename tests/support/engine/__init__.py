"""Kernels that the tests of the engine compile."""

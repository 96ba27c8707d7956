"""Devices: REFERENCE, CPU, OPENCL, HETERO, MULTI, AUTO; one file each, found by the registry."""

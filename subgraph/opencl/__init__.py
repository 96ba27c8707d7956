"""OPENCL machinery: devices found, programs built, plans of kernel launches; loads pyopencl late."""

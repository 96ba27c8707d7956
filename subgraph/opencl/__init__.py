"""OPENCL machinery: devices found, programs built, kernel launches planned; pyopencl loads late."""

"""What the kernels and lowerings of several families share."""

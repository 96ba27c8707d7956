"""Stand-ins for NVIDIA cards and for the libraries that need one."""

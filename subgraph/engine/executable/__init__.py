"""Executable plans of the CPU: plans as argument layouts, and these bound to memory."""

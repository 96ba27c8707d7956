"""Operators that the CPU device's fusions make."""

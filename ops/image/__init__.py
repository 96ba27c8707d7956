"""Operators that resize and sample images."""

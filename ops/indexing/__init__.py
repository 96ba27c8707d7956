"""Operators that take and put elements by index."""

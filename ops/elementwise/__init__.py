"""Elementwise operators, and chains of them as programs over vectors."""

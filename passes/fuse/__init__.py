"""Fusions: patterns of nodes become one node that a kernel computes."""

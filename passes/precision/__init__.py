"""Passes that change the dtype in which a graph is computed."""

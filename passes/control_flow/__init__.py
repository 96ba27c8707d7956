"""Passes that undo control flow: known conditions, loops and sequences."""

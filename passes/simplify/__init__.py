"""Passes that make a graph smaller or plainer and keep what it means."""

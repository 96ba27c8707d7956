"""Transforms of graphs: the registry of passes, their promises, instruments around them."""

"""Weights: the cache of what was made of parameters, and the memory and threads that make it."""

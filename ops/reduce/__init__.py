"""Reductions, ArgMax and ArgMin, running sums and products."""

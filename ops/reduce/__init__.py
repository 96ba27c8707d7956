"""Reductions, running sums and places of extremes."""

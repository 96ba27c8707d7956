"""Regions on the CPU: which plan or program runs one, and how its loops are run."""

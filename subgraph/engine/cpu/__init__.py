"""Regions on the CPU: its strategies, its programs in memory, and its compiled loops."""

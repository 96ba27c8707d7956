"""Regions on the CPU: its own strategies, its sessions, and its compiled loops."""

"""Regions on devices that plan: the op, its sessions, and the strategies that find plans."""

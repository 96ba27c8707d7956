"""Devices: one file each in ``plugins/`` and ``backends/``, found by the registry."""

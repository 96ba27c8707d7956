"""The one place where the version stands; setup.cfg reads it."""

__version__ = "0.1.0"

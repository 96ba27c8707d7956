"""Passes about types and sizes of values."""

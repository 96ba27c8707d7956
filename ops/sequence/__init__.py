"""Optional values."""

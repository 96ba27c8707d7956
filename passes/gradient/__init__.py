"""The pass that expands Gradient, and its rules."""

"""Losses, random numbers, training steps, and old forms of operators."""

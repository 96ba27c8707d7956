"""Losses, random numbers, windows, training steps, and other operators of no larger family."""

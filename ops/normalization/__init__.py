"""Softmax and normalizations."""

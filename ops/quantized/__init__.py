"""Quantization, and products and convolutions of bytes."""

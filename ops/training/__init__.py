"""Losses and the steps of optimizers."""

"""Operators that the CPU device makes of others: Hardmax, MeanVarianceNormalization, Einsum."""

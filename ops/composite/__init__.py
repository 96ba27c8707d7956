"""Operators that the CPU device composes of others: Hardmax, MeanVarianceNormalization, Einsum."""

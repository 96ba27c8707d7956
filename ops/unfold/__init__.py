"""Operators that unfold or fold windows: DeformConv, Col2Im, MaxUnpool, AffineGrid."""

"""Models of other frameworks: each file takes those of one framework."""

"""Testing tools for users: partition invariants, hypothesis strategies, one-line property checks."""

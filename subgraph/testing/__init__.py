"""Testing tools for users: partition invariants, graph strategies, one-line property checks."""

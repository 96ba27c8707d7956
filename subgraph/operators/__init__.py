"""What an operator is: its schema, requirements, type inference and reference semantics."""

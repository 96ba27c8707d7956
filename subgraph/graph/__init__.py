"""The graph: nodes, values, their types, parameters with versions, names, order and copies."""

"""Partition: regions are proposed, pruned, and replaced by subgraph nodes; three separate steps.

`workspace` numbers a graph's nodes, `contraction` answers what reaches what, `growth` and `hetero`
are the two strategies, `proposal` has the steps propose and prune, `replace` the step replace, and
`driver` runs them for every property and body. The pass PartitionGraph calls `partition`.
"""

"""Partition: regions are proposed, pruned, and replaced by subgraph nodes; three separate steps.

`workspace` numbers a graph's nodes. `search` is a graph of numbers and what can be done with it:
`contraction` answers what reaches what, `growth` (with `region_growth` and `frontier`) and `hetero`
(with `blocks` and `block_growth`) are the two strategies. All that works on `structures` of
integers, as it stands or as machine code (`backend`, `search_kernels`). `proposal` has the steps
propose and prune, `replace` the step replace, and `driver` runs them for every property and body.
The pass PartitionGraph calls `partition`.
"""

"""Partition: regions are proposed, pruned, and replaced by subgraph nodes; three separate steps.

`proposal` has the steps propose and prune, `replace` the step replace; `driver` runs the steps for
every property and body, and the pass PartitionGraph calls it. The folder `search` finds regions in
a graph of numbered nodes: `workspace` numbers the nodes, `contraction` answers reachability,
`growth` (with `region_growth` and `frontier`) and `hetero` (with `blocks` and `block_growth`) are
the two strategies. They work on `structures` of integers, as Python or as machine code (`backend`,
`search_kernels`).
"""

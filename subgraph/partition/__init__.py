"""Partition: regions are proposed, pruned, and replaced by subgraph nodes; three separate steps.

`proposal` has the steps propose and prune, `replace` the step replace; `driver` runs the steps for
every property and body, and the pass PartitionGraph calls it. The strategies, functions of
`proposal`, ask selectors (`growth`, `selector_driver`), and find regions in a graph of numbered
nodes by the folder `search`.
"""

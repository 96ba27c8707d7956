"""The search for regions in a graph of numbered nodes, as algorithms on tables of integers.

Input: a directed acyclic graph whose nodes are numbered in topological order (`workspace`), and
which of them may join a region: a device's nodes, or the answers of a selector. Output: regions.

Invariants after every operation (docs/partition.md, numbers 1 to 4):

- Regions are disjoint, and each is weakly connected.
- Each region is convex: no path leaves it and comes back.
- The graph in which every region is one node has no cycle. All questions of reachability are asked
  of this *contracted graph*, and its topological order is maintained.

Algorithms, with n nodes and m edges:

- `contraction`: contracts regions and maintains the topological order (Pearce and Kelly 2006). A
  contraction looks only at nodes between the positions of the region's first and last member.
- `region_growth` and `frontier`: strategy ``selector``, breadth first (MXNet's order). Candidates
  that a path over nodes outside connects are found while the region grows.
- `hetero`, `block_growth` and `blocks`: strategy ``hetero``, the largest region first (OpenVINO's
  rule), with a cache of growths. It grows in one biconnected component at a time (Hopcroft and
  Tarjan 1973, O(n + m)).

Both strategies take nearly linear time on real graphs, as the page docs/partition.md shows and
tests/partition/test_scaling.py checks, but not in the worst case: an edge is followed again for
each region in whose range of positions it lies. Tables take O(n + m) memory. `structures` defines
all tables; `search` is the interface for Python, `operations` the dispatch, and `backend` chooses
between Python and machine code (`search_kernels`).
"""

"""Passes: graph in, graph out; one file each, found by the registry."""

if __name__ != "subgraph.passes":
    raise ImportError(
        "this folder is the package subgraph.passes: pip install -e . and use that name"
    )

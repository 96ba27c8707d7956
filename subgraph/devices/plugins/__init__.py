"""The devices that come with Subgraph; one file each, found by the registry."""

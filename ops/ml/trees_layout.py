"""How a packed tree ensemble lies in memory, for what packs it and for the kernel."""

RECORD = 24  # bytes of a node
BLOCK = 32  # samples that go through a tree one after the other, while it is in the cache

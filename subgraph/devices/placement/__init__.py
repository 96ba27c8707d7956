"""The device of each node: by priority, by affinity, or by measured times of regions."""

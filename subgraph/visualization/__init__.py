"""Pictures of models, of their partitions, and of where and how long their nodes run."""

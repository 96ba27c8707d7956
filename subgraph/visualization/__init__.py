"""Pictures of models, of their partitions, and of where and how long their nodes run."""

# The endings of files that `Visualization.save` writes: a page, a drawing, Graphviz's language.
ENDINGS = (".html", ".svg", ".dot")

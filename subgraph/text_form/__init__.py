"""The text form of graphs: written by ``str(graph)``, read by ``sg.parse``."""

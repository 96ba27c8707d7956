"""Sphinx configuration; built by ``make docs``."""

import subgraph

project = "Subgraph"
author = "The Subgraph authors"
copyright = "2026, The Subgraph authors"
release = version = subgraph.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_use_ivar = True
# `type` is an attribute of several classes and a builtin; which is meant does not matter here.
suppress_warnings = ["ref.python"]

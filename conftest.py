"""Let an uninstalled checkout import like the installed package: setup.cfg maps the folders."""

from importlib.util import find_spec
from pathlib import Path

import subgraph

if find_spec("subgraph.passes") is None:
    subgraph.__path__.append(str(Path(__file__).parent))

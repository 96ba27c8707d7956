"""``python -m subgraph``: the command line where the script ``subgraph`` is not on the path."""

import sys

from subgraph.tools.cli import main

sys.exit(main())

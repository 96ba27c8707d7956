"""The command line of the scripts that make models: a folder, and names of models."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path


def chosen_models(description: str | None, names: Iterable[str]) -> tuple[Path, list[str]]:
    """Return the folder, which is made, and the chosen models; ends the process on a wrong one.

    Args:
        description: What the script makes, for ``--help``.
        names: Names of all models, which are made if the command line has none.
    """
    known = list(names)
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where to write the models")
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(known)}; none: all")
    options = parser.parse_args()
    for name in options.names:
        if name not in known:
            parser.error(f"there is no model {name!r}; there are {', '.join(known)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    return options.folder, options.names or known

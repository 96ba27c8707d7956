"""The step of a wheel's build that reports which compiled kernels the wheel contains.

``setup.cfg`` names it. The build loads this file without the package and its dependencies.
"""

from __future__ import annotations

from pathlib import Path

from setuptools.command.build_py import build_py


class BuildPackage(build_py):
    """Copies the package, and warns if the wheel would have no compiled kernels."""

    def run(self) -> None:
        """Copy the package's files and report the compiled kernels among them."""
        super().run()
        if not self.editable_mode:
            text, complete = carried(Path(self.get_package_dir("subgraph")) / "prebuilt")
            (self.announce if complete else self.warn)(text)


def carried(folder: Path) -> tuple[str, bool]:
    """Return a sentence about the compiled kernels in a folder, and whether there are any."""
    files = sorted(path for path in folder.glob("*.pack") if path.stem != "schemas")
    if not files:
        text = "the wheel carries no compiled kernels, so that a first call takes seconds: "
        return text + "`make wheel` compiles them for it", False
    size = sum(path.stat().st_size for path in files) / 1e6
    names = ", ".join(path.stem for path in files)
    return f"the wheel carries compiled kernels for {names} ({size:.1f} MB)", True

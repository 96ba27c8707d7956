"""PyInstaller's hook for the package: which modules and files an application needs.

Modules are found by name while a process runs, so that all of them are listed, and collected as
source files: registries read which names a module registers, and the keys of compiled kernels are
hashes of sources.
"""

from __future__ import annotations

from PyInstaller.utils.hooks import collect_data_files, collect_submodules, copy_metadata

_LEFT_OUT = ("subgraph.testing", "subgraph.tools.build_command", "subgraph.tools.pyinstaller")
hiddenimports = collect_submodules("subgraph", lambda name: not name.startswith(_LEFT_OUT))
# Types of public names, which are imported when they are used; kernels for OPENCL; prebuilt code.
# The keys of kernels have the version of numba.
datas = [*collect_data_files("subgraph"), *copy_metadata("numba")]
module_collection_mode = "py"
# Libraries behind devices and converters, which an application that uses one imports itself.
excludedimports = [
    "hypothesis",
    "onnxruntime",
    "openvino",
    "pytest",
    "setuptools",
    "tensorrt",
    "torch",
]

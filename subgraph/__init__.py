"""Subgraph: bring your accelerator to any ONNX model, in Python.

Everything that users call is here; ``__init__.pyi`` lists the names. They load when first used, so
that importing the package takes neither numba nor pyopencl nor onnx.
"""

import lazy_loader

from subgraph import connections as connections
from subgraph._version import __version__ as __version__

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

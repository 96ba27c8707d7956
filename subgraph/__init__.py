"""Subgraph: bring your accelerator to any ONNX model, in Python.

This is the public interface; ``__init__.pyi`` lists the names. Each loads when it is first used, so
that importing the package imports neither numba nor pyopencl nor onnx.
"""

import lazy_loader

from subgraph import connections as connections
from subgraph._version import __version__ as __version__

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

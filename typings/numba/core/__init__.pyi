from numba import types as types

"""The implementations of all hooks, which are calls from a lower folder to a higher one.

The lower folder declares a `subgraph.system.hooks.Hook`; this file imports the implementation at
the first call. No other file refers to both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from subgraph.system.hooks import implements

_Function = Callable[..., Any]


@implements("verify a graph")
def _verify() -> _Function:
    from subgraph.operators.verify import verify

    return verify


@implements("text of a graph")
def _text() -> _Function:
    from subgraph.text_form.writer import print_graph

    return print_graph


@implements("types of a region")
def _region_types() -> _Function:
    from subgraph.operators.type_inference import output_types_of

    return output_types_of


@implements("session of the default executor")
def _default_session() -> _Function:
    from subgraph.runtime.executor import ExecutorSession

    return ExecutorSession


@implements("address of a kernel")
def _kernel_address() -> _Function:
    from subgraph.engine.toolchain.toolchain import address

    return address


@implements("export a model")
def _export_model() -> _Function:
    from subgraph.devices.export import export_model

    return export_model


@implements("pickle a model")
def _pickle_model() -> _Function:
    from subgraph.devices.default_core import reduce_model

    return reduce_model


@implements("import a model")
def _import_model() -> _Function:
    from subgraph.devices.export import import_model

    return import_model


@implements("compile a queried graph")
def _compile_checked() -> _Function:
    from subgraph.devices.calls import compile_checked

    return compile_checked


@implements("fallback of an op")
def _fallback() -> _Function:
    from subgraph.devices.fallback import DeviceFallback

    return DeviceFallback

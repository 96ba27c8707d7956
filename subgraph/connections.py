"""Which function answers each hook: every call from a folder to one that comes after it.

A lower folder declares a `subgraph.system.hooks.Hook`; this file, the only one that knows both
sides, names the function behind it. All loads at the first call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from subgraph.system.hooks import answers

_Function = Callable[..., Any]


@answers("verify a graph")
def _verify() -> _Function:
    from subgraph.operators.verify import verify

    return verify


@answers("text of a graph")
def _text() -> _Function:
    from subgraph.text_form.writer import print_graph

    return print_graph


@answers("types of a region")
def _region_types() -> _Function:
    from subgraph.operators.type_inference import output_types_of

    return output_types_of


@answers("session of the default executor")
def _default_session() -> _Function:
    from subgraph.runtime.executor import ExecutorSession

    return ExecutorSession


@answers("address of a kernel")
def _kernel_address() -> _Function:
    from subgraph.engine.toolchain.toolchain import address

    return address


@answers("export a model")
def _export_model() -> _Function:
    from subgraph.devices.export import export_model

    return export_model


@answers("import a model")
def _import_model() -> _Function:
    from subgraph.devices.export import import_model

    return import_model


@answers("compile a queried graph")
def _compile_checked() -> _Function:
    from subgraph.devices.calls import compile_checked

    return compile_checked


@answers("fallback of an op")
def _fallback() -> _Function:
    from subgraph.devices.fallback import DeviceFallback

    return DeviceFallback

"""Source of a Python test for a counterexample: the graph as text, and its large weights."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from subgraph.graph.graph import Graph
from subgraph.text_form.parser import parse


def as_test(graph: Graph, prop: Any, options: str) -> str:
    """Return the source of a test of `check_property` on one graph.

    Args:
        graph: The graph that fails.
        prop: The property: the source imports a class, and has the ``repr`` of anything else.
        options: Further arguments of `check_property`, as source that begins with a comma.
    """
    imports = "import base64\n\nimport numpy as np\n\nimport subgraph as sg\n"
    shown = repr(prop)
    if isinstance(prop, type):
        shown = prop.__name__
        # A class inside a function cannot be imported; the comment says where to find it.
        local = "<locals>" in prop.__qualname__
        hint = f"# {shown}: a class defined in {prop.__module__}.{prop.__qualname__}\n"
        imports += hint if local else f"from {prop.__module__} import {shown}\n"
    elif type(prop).__name__ == "ContainOpSelector":
        shown = f"sg.{shown}"
    text = str(graph).rstrip("\n")
    weights = "".join(
        f"        {name!r}: {_source(array)},\n" for name, array in _left_out(graph, text).items()
    )
    given = f", parameters={{\n{weights}    }}" if weights else ""
    if not weights:
        imports = imports.replace("import base64\n\nimport numpy as np\n\n", "")
    quoted = text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    return (
        f"{imports}\n\ndef test_counterexample() -> None:\n"
        f'    graph = sg.parse("""{quoted}\n"""{given})\n'
        f"    sg.testing.check_property({shown}, models=[graph], max_examples=0{options})\n"
    )


def _left_out(graph: Graph, text: str) -> dict[str, Any]:
    """Return the weights whose elements the text omits."""
    kept = parse(text).parameters
    return {
        name: parameter.array
        for name, parameter in graph.parameters.items()
        if name not in kept or not np.array_equal(kept[name].array, parameter.array)
    }


def _source(array: Any) -> str:
    packed = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    read = f'np.frombuffer(base64.b64decode("{packed}"), "{array.dtype.name}")'
    return f"{read}.reshape({tuple(array.shape)}).copy()"

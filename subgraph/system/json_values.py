"""Values from JSON text, as they were before `json.dumps`."""

from __future__ import annotations

from typing import Any, cast


def with_tuples(value: Any) -> Any:
    """Return a value of `json.loads` with tuples in place of lists, also in nested lists."""
    return tuple(map(with_tuples, cast(list[Any], value))) if isinstance(value, list) else value

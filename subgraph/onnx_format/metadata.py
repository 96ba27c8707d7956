"""Metadata of ONNX messages: how it is read and written, and the keys that this project uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from subgraph.errors import ModelError
from subgraph.onnx_format.checks import text_of
from subgraph.operators.messages import StringStringEntryProto

# Keys of a FunctionProto that stands for a subgraph node: a mark, what the node had, and the number
# of inputs at the end that only bodies inside the function read.
SUBGRAPH_NODE = "subgraph.node"
OP_TYPE = "subgraph.op_type"
OP_DOMAIN = "subgraph.domain"
OP_VERSION = "subgraph.version"
GRAPH_NAME = "subgraph.graph"
HIDDEN_INPUTS = "subgraph.hidden_inputs"
# Key of a graph or function: the record of the partition that `explain` reads, as JSON.
PARTITION_RECORD = "subgraph.partition"
_MAX_DIGITS = 9  # versions and numbers of inputs fit into 32 bits


def metadata_of(entries: Iterable[StringStringEntryProto]) -> dict[str, str]:
    """Return the metadata entries of a message as a dict.

    Raises:
        ModelError: a text is not UTF-8.
    """
    return {text_of(entry.key): text_of(entry.value) for entry in entries}


def number_in(metadata: Mapping[str, str], key: str, default: int) -> int:
    """Return the number under a key.

    Args:
        metadata: The metadata.
        key: The key.
        default: The number if the key is absent.

    Raises:
        ModelError: the text is no decimal number, or one of more than nine digits.
    """
    text = metadata.get(key)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise ModelError(f"metadata {key!r} is {text[:40]!r}; it must be a number")
    return int(text)


def add_metadata(proto: Any, metadata: Mapping[str, str]) -> None:
    """Add metadata entries to a message that has ``metadata_props``."""
    for key, text in metadata.items():
        proto.metadata_props.add(key=key, value=text)

"""The standard's schemas as one text, which a process reads without importing onnx.

The text has a line for each version of each operator. The package has a file of it (``make
kernels``) for one release of onnx; for another release it is computed once and stored in the user's
cache folder. Both are found by a hash of the onnx package and of the code that writes and reads the
text, so that they always fit; a missing or damaged text is computed again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import attrs

from subgraph.operators import schema_types
from subgraph.operators.schema_types import Attribute, Schema, from_onnx, newest_of_package
from subgraph.system import objectcache
from subgraph.system.json_values import with_tuples
from subgraph.system.objectcache import ObjectCode
from subgraph.system.prebuilt_files import read_data

PREBUILT: Final = "schemas"  # name of the file in the package


@attrs.frozen
class SchemaCache:
    """Schemas as text: lines of domain, operator, version and a JSON object, separated by tabs.

    Attributes:
        lines: The lines, with a newline before and after each; versions of an operator ascend.
        newest: The newest operator set of each domain.
    """

    lines: bytes
    newest: Mapping[str, int]

    def find(self, op_type: str, domain: str, version: int) -> Schema | None:
        """Return the schema in force in an operator set, None if there is no such operator.

        Args:
            op_type: Name of the operator.
            domain: Its domain; "" is ONNX's own.
            version: Version of the domain's operator set, at least 1.
        """
        # The text is searched for each operator: parsing all of its some 660 schemas would take
        # about 40 ms in every process.
        start = f"\n{domain}\t{op_type}\t".encode()
        found: bytes | None = None
        at = self.lines.find(start)
        while at >= 0:
            end = self.lines.index(b"\n", at + 1)
            since, _, rest = self.lines[at + len(start) : end].partition(b"\t")
            if int(since) > version:
                break
            found = rest
            at = self.lines.find(start, end)
        return None if found is None else _from_json(found)


@cache
def cached_schemas() -> SchemaCache | None:
    """Return the schemas of the installed onnx package; None if there is no text and no cache."""
    release = release_key()
    if release is None:
        return None
    text = read_data(PREBUILT, release) or _from_cache(release)
    if text is None:
        return None
    head, _, lines = text.partition(b"\n")
    return SchemaCache(b"\n" + lines, json.loads(head))


def _from_cache(release: str) -> bytes | None:
    """Return the text from the user's cache, computing and storing it if it is not there."""
    key = _library_key(release)
    if key is None:
        return None
    entry = objectcache.read(key)
    if entry is None:
        if not objectcache.writable(warn=False):
            return None
        entry = ObjectCode((), schemas_of_package())
        objectcache.write(key, entry)
    return entry.data


def release_key() -> str | None:
    """Return a hash of onnx's release and of this code; None if onnx's files are not as expected.

    It names the text in the package, which depends on the release of onnx only.
    """
    folder = _onnx_folder()
    if folder is None:
        return None
    try:
        parts = [Path(file).read_bytes() for file in (__file__, schema_types.__file__)]
        # A text of another release, or written by other code, must never be read.
        parts.append((folder / "version.py").read_bytes())
    except OSError:
        return None
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _library_key(release: str) -> str | None:
    """Return a hash of ``release`` and onnx's installed libraries, which a user may have built."""
    folder = _onnx_folder()
    if folder is None:
        return None
    parts = [release]
    try:
        for library in sorted(folder.glob("onnx_cpp2py_export.*")):
            status = library.stat()
            # Size and time instead of content: every process would hash the 7 MB of the library.
            parts.append(f"{library.name} {status.st_size} {status.st_mtime_ns}")
    except OSError:
        return None
    return hashlib.sha256("\0".join(parts).encode()).hexdigest() if len(parts) > 1 else None


def _onnx_folder() -> Path | None:
    spec = find_spec("onnx")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def schemas_of_package() -> bytes:
    """Return the text: a line with the newest operator sets, then one for each schema."""
    import onnx.defs

    found = map(from_onnx, onnx.defs.get_all_schemas_with_history())
    ordered = sorted(found, key=lambda s: (s.domain, s.op_type, s.since_version))
    newest = {s.domain: newest_of_package(s.domain) for s in ordered}
    return "\n".join([json.dumps(newest), *map(_line, ordered), ""]).encode()


def _line(schema: Schema) -> str:
    attributes = [attrs.astuple(attribute) for attribute in schema.attributes.values()]
    dtypes = [sorted(group) for group in schema.input_dtypes]
    rest = attrs.asdict(schema, recurse=False)
    rest.update(attributes=attributes, input_dtypes=dtypes)
    return f"{schema.domain}\t{schema.op_type}\t{schema.since_version}\t{json.dumps(rest)}"


def _from_json(text: bytes) -> Schema:
    fields: dict[str, Any] = {key: with_tuples(value) for key, value in json.loads(text).items()}
    attributes = [Attribute(*each) for each in fields["attributes"]]
    groups: Iterable[Any] = fields["input_dtypes"]
    fields["attributes"] = {attribute.name: attribute for attribute in attributes}
    fields["input_dtypes"] = tuple(map(frozenset, groups))
    return Schema(**fields)

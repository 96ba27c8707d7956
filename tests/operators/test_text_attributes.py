"""Texts of which the standard lists the allowed ones: every other text is refused, everywhere."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.defs
import pytest
from wrong_sizes import runs
from wrong_sizes.damage import Case
from wrong_sizes.samples import Sample, element_type, samples

from subgraph.operators.schema import canonical_domain

pytestmark = pytest.mark.filterwarnings("ignore")
# Attributes that hold any text: labels, words, patterns. Einsum's equation has its own grammar.
FREE = frozenset(
    (
        *("cats_strings", "classes_strings", "classlabels_strings", "default_string"),
        *("delimiter", "equation", "keys_strings", "locale", "pattern", "pool_strings"),
        *("stopwords", "string_vocabulary", "value_string", "value_strings", "values_strings"),
    )
)
TEXTS = (onnx.defs.OpSchema.AttrType.STRING, onnx.defs.OpSchema.AttrType.STRINGS)
# Attributes of ONNX Runtime's operators, of which onnx has no schemas.
MICROSOFT = (
    *(("CDist", "metric"), ("FusedConv", "activation"), ("FusedGemm", "activation")),
    *(("FusedMatMulActivation", "activation"), ("GridSample", "mode"), ("Pad", "mode")),
    *(("GridSample", "padding_mode"), ("NhwcMaxPool", "auto_pad"), ("QLinearConv", "auto_pad")),
    ("QLinearAveragePool", "auto_pad"),
)


def listed() -> list[tuple[str, str, int, str]]:
    """Return domain, operator, version and attribute of each text that must be one of some."""
    found = [
        (canonical_domain(schema.domain), schema.name, schema.since_version, name)
        for schema in onnx.defs.get_all_schemas_with_history()
        for name, attribute in schema.attributes.items()
        if attribute.type in TEXTS and name not in FREE and not schema.deprecated
    ]
    found = [key for key in found if key[1] != "Gradient"]
    return sorted([*found, *(("com.microsoft", op, 1, name) for op, name in MICROSOFT)])


LISTED = listed()


def sample_of(domain: str, op: str, version: int) -> Sample:
    """Return an honest sample of a version of an operator that has attributes if one does."""
    wanted = ",".join(sorted({key[1] for key in LISTED}))
    fitting = [
        sample
        for group in samples(wanted)
        for sample in group
        if (sample.node.domain, sample.node.op_type, sample.version) == (domain, op, version)
    ]
    # A Cast to the same dtype is removed before anything looks at it.
    return max(fitting, key=lambda s: (len(s.node.attribute), not _is_cast_to_itself(s)))


def _is_cast_to_itself(sample: Sample) -> bool:
    first = next(iter(sample.values.values()))
    to = next((a.i for a in sample.node.attribute if a.name == "to"), 0)
    return isinstance(first, np.ndarray) and to == element_type(first)


@pytest.mark.parametrize(("form", "device"), [("unknown", "CPU"), ("sizes", "REFERENCE")])
@pytest.mark.parametrize(("domain", "op", "version", "name"), LISTED, ids=str)
def test_an_unknown_text_is_refused(
    domain: str, op: str, version: int, name: str, form: str, device: str
) -> None:
    sample = sample_of(domain, op, version)
    node = onnx.NodeProto()
    node.CopyFrom(sample.node)
    del node.attribute[:]
    before = next((a for a in sample.node.attribute if a.name == name), None)
    many = 6 if name == "activations" else len(before.strings) if before else 0
    word = onnx.helper.make_attribute(name, ["no such word"] * many or "no such word")
    node.attribute.extend([*(a for a in sample.node.attribute if a.name != name), word])
    case = Case(0, sample, node, form, frozenset(), [])
    model = case.model(sample.values)
    with np.errstate(all="ignore"):
        [answer] = runs.ours(device, model, [sample.values])
    assert answer.results is None
    assert not answer.raw, answer.error
    assert "no such word" in answer.error

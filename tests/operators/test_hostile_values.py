"""Operands whose values are indices, counts or positions: hostile values harm no device.

Each is planted in an operand that a run gives, after the honest values, and in a constant. All
devices refuse it, or give what the reference gives. Guard pages (`SUBGRAPH_GUARD`) and Oclgrind
see an access outside even where the result is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from wrong_sizes import comparison
from wrong_sizes.damage import Case, Damaged
from wrong_sizes.reasons import reason
from wrong_sizes.runs import ours
from wrong_sizes.samples import Operand, Sample, samples

from subgraph.graph.limits import limited
from subgraph.graph.types import Array

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
# Operator -> positions of the operands whose values become addresses, sizes or numbers of steps.
# Loop's number of iterations has a test of its own: it may be endless, and is cancelled.
OPERANDS: dict[str, tuple[int, ...]] = {
    # elements that are chosen
    **{"Gather": (1,), "GatherElements": (1,), "GatherND": (1,), "OneHot": (0, 1)},
    **{"Scatter": (1,), "ScatterElements": (1,), "ScatterND": (1,), "TensorScatter": (2,)},
    **{"MaxUnpool": (1, 2), "RoiAlign": (1, 2), "MaxRoiPool": (1,), "GridSample": (1,)},
    **{"DeformConv": (2,), "NegativeLogLikelihoodLoss": (1,), "SoftmaxCrossEntropyLoss": (1,)},
    **{"ArrayFeatureExtractor": (1,), "RotaryEmbedding": (3,), "SequenceAt": (1,)},
    **{"SequenceErase": (1,), "SequenceInsert": (2,), "GatherBlockQuantized": (1,)},
    **{"EmbedLayerNormalization": (0, 1, 8), "QEmbedLayerNormalization": (0, 1, 7)},
    # lengths within an operand
    **{"ReverseSequence": (1,), "LSTM": (4,), "GRU": (4,), "RNN": (4,), "Scan": (0,)},
    **{"DynamicQuantizeLSTM": (4,), "GroupQueryAttention": (5, 6), "Attention": (6,)},
    # axes and triangles
    **{"CumSum": (1,), "CumProd": (1,), "Squeeze": (1,), "Unsqueeze": (1,), "ReduceSum": (1,)},
    **{"ReduceMax": (1,), "Trilu": (1,), "ExpandDims": (1,)},
    # sizes of a result
    **{"Slice": (1, 2, 3, 4), "Pad": (1, 3), "Tile": (1,), "Expand": (1,), "Reshape": (1,)},
    **{"ConstantOfShape": (0,), "Range": (0, 1, 2), "Split": (1,), "SplitToSequence": (1,)},
    **{"TopK": (1,), "Resize": (2, 3), "Upsample": (1,), "AffineGrid": (1,), "Col2Im": (1, 2)},
    **{"CenterCropPad": (1,), "DFT": (1, 2), "STFT": (1, 3), "NonMaxSuppression": (2,)},
    **{"BlackmanWindow": (0,), "MelWeightMatrix": (0, 1), "RelativePositionBias": (1, 2)},
    # numbers of bits
    **{"BitShift": (1,), "Mod": (1,), "Div": (1,)},
}
INTEGERS = (-(1 << 63), -(1 << 31) - 1, -2, 1 << 31, 1 << 62, (1 << 63) - 1)
# The standard leaves open which of the updates at equal indices remains, and -2 would be equal.
UNIQUE = tuple(-1 if value == -2 else value for value in INTEGERS)
FLOATS = (float("nan"), float("inf"), float("-inf"), -1e38, 1e38, 3e9)


@cache
def sample_of(op: str, position: int) -> Sample | None:
    """Return an honest sample, of the newest version that has an operand at the position."""
    found: Sample | None = None
    for group in samples(",".join(sorted(OPERANDS))):
        for sample in group:
            names = sample.node.input
            if sample.node.op_type != op or position >= len(names) or not names[position]:
                continue
            value = sample.values.get(names[position])
            numbers = isinstance(value, np.ndarray) and value.size and value.dtype.kind in "iuf"
            if numbers and (found is None or sample.version > found.version):
                found = sample
    return found


def planted(sample: Sample, position: int) -> list[Damaged]:
    """Return the sample's operands with one hostile value each, at the operand's first place."""
    name = sample.node.input[position]
    honest = sample.values[name]
    assert isinstance(honest, np.ndarray)
    sets: list[Damaged] = []
    integers = UNIQUE if sample.node.op_type.startswith("Scatter") else INTEGERS
    values: Sequence[float] = FLOATS if honest.dtype.kind == "f" else integers
    for value in values:
        array: Array = honest.copy()
        if honest.dtype.kind in "iu":
            limits = np.iinfo(honest.dtype)
            value = min(max(int(value), int(limits.min)), int(limits.max))
        array.reshape(-1)[0] = value
        operands: dict[str, Operand] = {**sample.values, name: array}
        sets.append(Damaged(operands, f"{name}[0] = {value}"))
    return sets


def wrong(case: Case, *devices: str) -> list[str]:
    """Return what devices disagree on, or raise that is no error of ours."""
    warm = case.form == "unknown"
    model = case.model(case.honest.values if warm else case.sets[0].values)
    given = [
        {name: v for name, v in chosen.values.items() if name not in case.constant}
        for chosen in ([Damaged(case.honest.values, "")] if warm else []) + case.sets
    ]
    with limited(memory=1 << 28), np.errstate(all="ignore"):
        answers = [ours(device, model, given, warm=warm) for device in devices]
    found: list[str] = []
    for position in range(len(case.sets)):

        def note(kind: str, said: str, position: int = position) -> None:
            if not reason(kind, case, position, said):
                found.append(f"{kind}: {case.text(position)}: {said}")

        comparison._compare_devices(case, devices, [of[position] for of in answers], note)
    return found


ROWS = [(op, position) for op, positions in OPERANDS.items() for position in positions]


@pytest.mark.parametrize("device", ["CPU", "OPENCL"])
@pytest.mark.parametrize(("op", "position"), ROWS)
def test_in_a_run(op: str, position: int, device: str) -> None:
    sample = sample_of(op, position)
    assert sample is not None, "no honest sample has this operand"
    case = Case(0, sample, sample.node, "unknown", frozenset(), planted(sample, position))
    assert wrong(case, "REFERENCE", device) == []


@pytest.mark.parametrize(("op", "position"), ROWS)
def test_as_a_constant(op: str, position: int) -> None:
    sample = sample_of(op, position)
    assert sample is not None, "no honest sample has this operand"
    name = frozenset([sample.node.input[position]])
    for chosen in planted(sample, position)[::5]:
        case = Case(0, sample, sample.node, "constants", name, [chosen])
        assert wrong(case, "REFERENCE", "CPU") == []

"""Why ONNX Runtime and Subgraph may differ on operands that do not fit."""

from __future__ import annotations

import re
from typing import Final

import attrs

from wrong_sizes.damage import Case


@attrs.frozen
class Reason:
    """A difference that is right.

    Attributes:
        kind: Kind of the finding.
        said: Regular expression that its text holds.
        why: Why it is right.
        operators: Operators that it is about, separated by spaces; "" for all.
        damage: Regular expression that the damage holds.
    """

    kind: str
    said: str
    why: str
    operators: str = ""
    damage: str = ""

    def holds(self, kind: str, case: Case, position: int, said: str) -> bool:
        """Return whether this is the reason of a finding."""
        if kind != self.kind or not re.search(self.said, said):
            return False
        if not re.search(self.damage, case.sets[position].what):
            return False
        return not self.operators or case.node.op_type in self.operators.split()


_EXTREME = r"\] = (nan|-?inf|1e\+38)|= (nan|-?inf|1e\+38) for"
_HUGE = r"\] = -?[0-9]{10,}"
_SUMS = (
    "ReduceL1 ReduceL2 ReduceMean ReduceProd ReduceSum ReduceSumSquare ReduceLogSum ReduceLogSumExp"
)
_OVERFLOW = "what becomes of sums that integers do not hold is left open"
_LEFT_OPEN = "what NaN, infinities and sums beyond the dtype give is left open; sizes are judged"

_EMPTY_IMAGES = "it refuses images without channels or places; the standard does not"
_ONE_NUMBER = "one number may be a scalar or a list of one, on all devices"
_SHOWN_SIZES = "it must know these sizes when it loads the model"
_NO_KERNEL = "it has no kernel for these dtypes or sizes"
_STATED = "the standard states these values, and no others"
_TWICE = "the standard allows an axis once"
_RANGE = "the standard gives the range of the axis"
_OPEN_WORDS = "the standard does not say that other words are an error"

REASONS: Final = (
    Reason("values", "", _LEFT_OPEN, damage=_EXTREME),
    Reason("other", "", _LEFT_OPEN, damage=_EXTREME),
    Reason("verdict", "cannot convert float (NaN|inf)", _LEFT_OPEN, damage=_EXTREME),
    Reason("values", "", _OVERFLOW, _SUMS, damage=_HUGE),
    Reason("other", "", _OVERFLOW, _SUMS, damage=_HUGE),
    Reason("values", "", "what is divided by a scale of 0 is left open", "QuantizeLinear", "= 0.0"),
    Reason("other", "", "what is divided by a scale of 0 is left open", "QuantizeLinear", "= 0.0"),
    Reason(
        "other", "", "the mean of no numbers is NaN, as in NumPy", "ReduceMean", "empty|shorter"
    ),
    Reason(
        "other", "", "after no steps the state is the first one", "LSTM GRU RNN", "empty|shorter"
    ),
    Reason("strict", "it must be 0 or 1", "the standard says nothing of other numbers"),
    Reason("strict", "it must be one of", _STATED),
    Reason("strict", "name one twice", _TWICE),
    Reason("strict", r"(axis|axes) (is|are) .*outside|an input of rank", _RANGE),
    Reason("strict", "time_axis", _STATED, operators="ReverseSequence"),
    Reason(
        "strict",
        "label|labels holds",
        "a label that is no class is an error",
        "NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss",
    ),
    Reason("strict", "(is|are) needed|needs rank|a list is needed", "the standard says this shape"),
    Reason("strict", "does not broadcast to", "the standard broadcasts in one direction", "PRelu"),
    Reason("strict", "must hold one number", "the standard says one number"),
    Reason(
        "strict", "negative dimension|size is \\[|is negative|, -[0-9]+ is", "no size is negative"
    ),
    Reason(
        "strict",
        "zero-size array to reduction",
        "of no numbers there is no largest",
        "DynamicQuantizeLinear",
    ),
    Reason("strict", "a window of .* does not fit", "no place of the window lies inside"),
    Reason("strict", "keys .* do not fit max_map", "keys lie below max_map", "CastMap"),
    Reason("strict", "features", "the numbers of the attribute are those of the features"),
    Reason("strict", "LimitError", "more memory than the budget of the fuzzer"),
    Reason("strict", "scalar", "the standard says a scalar", "DFT SequenceAt SequenceErase"),
    Reason(
        "strict",
        "do not broadcast together",
        "neither has the sizes of the other",
        "SkipLayerNormalization",
    ),
    Reason("strict", "must match exactly", "sizes beside the axis are equal", "ConcatFromSequence"),
    Reason(
        "lax",
        "division by zero|modulo by zero",
        "integers divided by zero give 0, as docs/devices.md says",
    ),
    Reason("lax", "(?i)not_?implemented", _NO_KERNEL),
    Reason("lax", "No corresponding Numpy type|MLDataType for", _NO_KERNEL),
    Reason("lax", "Unsupported pooling size|Unexpected mode of 3", _NO_KERNEL),
    Reason("lax", r"pool_attributes\.h|invalid channel count|must be positive", _EMPTY_IMAGES),
    Reason("lax", "dimension size is known", _SHOWN_SIZES),
    Reason("lax", r"GetEffectiveAxes|k tensor should be a 1D|squeeze\.h", _ONE_NUMBER),
    Reason(
        "lax",
        "quantize_linear|QLinearMatMul",
        "one scale may have any rank, and rows scales of their own",
    ),
    Reason(
        "lax",
        "must be in \\[-rank|Input rank must be|on a scalar|Input rank was 0|axis must be in",
        "a scalar counts as one axis of one element",
    ),
    Reason("lax", "size_ % 2|alpha_ > 0", "the standard asks for neither", "LRN"),
    Reason("lax", "min_ <= max_", "of bounds in reverse order the upper one holds", "Clip"),
    Reason("lax", "approximation_algorithm|Invalid 'direction'", _OPEN_WORDS),
    Reason("lax", "Pad reflect", "what is reflected repeats, as in NumPy"),
    Reason("lax", "zero points shape and scales", "two zero points of 4 bits share a byte"),
    Reason("lax", "is expected to have", "it takes fewer ranks; sums and scales broadcast here"),
    Reason(
        "strict", "conditions for", "a condition behind the last slice selects nothing", "Compress"
    ),
    Reason("strict", "not implemented shape", "a scalar is no list of samples", "OneHotEncoder"),
    Reason("lax", "attention_helper", "a mask may know fewer keys than there are", "Attention"),
    Reason("lax", "must be less than max", "output_shape says the sizes", "ConvTranspose"),
    Reason("lax", "", "what a body declares of its inputs need not hold", "Loop Scan If"),
    Reason("lax", "", "the dtype of an empty sequence decides nothing", "SequenceEmpty"),
    Reason("lax", "hidden_size", "the weights say it too", "LSTM GRU RNN"),
    Reason("lax", "GetAttr", "an attribute that is left out has its default", "RegexFullMatch"),
    Reason("lax", "feature size", "features are the last axis", "Scaler Imputer"),
    Reason("lax", "Failed to allocate", "it has less memory"),
    Reason("lax", "one-dim tensor", "the value is one number of any rank", "ConstantOfShape"),
    Reason("lax", "", "places behind the last n-gram are not used", "TfIdfVectorizer"),
)


def reason(kind: str, case: Case, position: int, said: str) -> str:
    """Return why a difference is right, "" if nothing says so.

    Args:
        kind: Kind of the finding.
        case: The case.
        position: Its set of operands.
        said: Text of the finding.
    """
    return next((each.why for each in REASONS if each.holds(kind, case, position, said)), "")

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


_EXTREME = r"\] = (nan|-?inf|-?1e\+38)|= (nan|-?inf|1e\+38) for|[\[ ](nan|-?inf)[,\]].* for"
_HUGE = r"\] = -?[0-9]{10,}"
_SUMS = (
    "ReduceL1 ReduceL2 ReduceMean ReduceProd ReduceSum ReduceSumSquare ReduceLogSum ReduceLogSumExp"
)
_OVERFLOW = "what becomes of sums that integers do not hold is left open"
_QUANTIZED = "QLinearMatMul QLinearGlobalAveragePool QLinearAveragePool"
_PAIRS = "without VNNI it adds pairs of products by signed bytes in 16 bits, which saturate"
_MIDDLE = "a quotient near the middle of two integers may round to either"
_LEFT_OPEN = "what NaN, infinities and sums beyond the dtype give is left open; sizes are judged"

_EMPTY_IMAGES = "it refuses images without channels or places; the standard does not"
_ONE_NUMBER = "one number may be a scalar or a list of one, on all devices"
_SHOWN_SIZES = "it must know these sizes when it loads the model"
_NO_KERNEL = "it has no kernel for these dtypes or sizes"
_STATED = "the standard states these values, and no others"
_TWICE = "the standard allows an axis once"
_RANGE = "the standard gives the range of the axis"
_EMPTY_LIST = "an empty list counts as left out"
_MOST_APART = "strides and taps are at most 2**31 - 1, so that positions fit into 64 bits"
_NON_FINITE = "what NaN and infinities give is left open; no index is computed from them unchecked"

REASONS: Final = (
    Reason("values", "", _LEFT_OPEN, damage=_EXTREME),
    Reason("other", "", _LEFT_OPEN, damage=_EXTREME),
    Reason("values", "differ, by at most 1$", _MIDDLE, _QUANTIZED),
    Reason("other", "differ, by at most 1$", _MIDDLE, _QUANTIZED),
    Reason("values", "", "the norm of such small numbers is 0", "LpNormalization", "= 1e-40"),
    Reason("verdict", "LimitError", "one device needs more memory than another", damage="[0-9]{9}"),
    Reason("verdict", "cannot convert float (NaN|inf)", _LEFT_OPEN, damage=_EXTREME),
    Reason("values", "", _OVERFLOW, _SUMS, damage=_HUGE),
    Reason("other", "", _OVERFLOW, _SUMS, damage=_HUGE),
    Reason("values", "", "what is divided by a scale of 0 is left open", "QuantizeLinear", "= 0.0"),
    Reason("other", "", "what is divided by a scale of 0 is left open", "QuantizeLinear", "= 0.0"),
    Reason(
        *("other", "off by nan", "the mean of no numbers is NaN, as in NumPy", "ReduceMean"),
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
    Reason("strict", "it must be a list", "the standard says a list", "SplitToSequence"),
    Reason("strict", "no elements to filter", "as the standard's operator", "CausalConvWithState"),
    Reason("strict", "a window of .* does not fit", "no place of the window lies inside"),
    Reason("strict", "keys .* do not fit max_map", "keys lie below max_map", "CastMap"),
    Reason("strict", "features", "the numbers of the attribute are those of the features"),
    Reason("strict", "LimitError", "more memory than the budget of the fuzzer"),
    Reason("strict", "scalar", "the standard says a scalar", "DFT SequenceAt SequenceErase"),
    Reason(
        "strict",
        "do not broadcast together|does not broadcast to",
        "the skip has the sizes of the input",
        "SkipLayerNormalization SkipSimplifiedLayerNormalization",
    ),
    Reason("strict", "does not fill an axis", "parts fill the axis", "SplitToSequence"),
    Reason("strict", "must match exactly", "sizes beside the axis are equal", "ConcatFromSequence"),
    Reason(
        "lax",
        "division by zero|modulo by zero",
        "integers divided by zero give 0, as docs/devices.md says",
    ),
    Reason("lax", "(?i)not_?implemented", _NO_KERNEL),
    Reason("lax", "No corresponding Numpy type|MLDataType for", _NO_KERNEL),
    Reason(
        "lax", "Unsupported pooling size|Unsupported kernel dim|Unexpected mode of 3", _NO_KERNEL
    ),
    Reason("lax", "'Cubic' mode only supports", _NO_KERNEL, "Resize Upsample"),
    Reason("lax", "bad_alloc", "it takes memory for the attribute's number", "LRN"),
    Reason("lax", "Failed to construct locale", "its machine lacks the default locale"),
    Reason("lax", "cannot be less than 3", "without pixels there is nothing to average"),
    Reason(
        "lax", "class_count_ > 0|input_?dimensions|_vocabulary", "an attribute that may be left out"
    ),
    Reason("lax", "expected to be a 1D tensor", "a table may have any shape", "LabelEncoder"),
    Reason("lax", "PrePack", "the attributes say the sizes", "MatMulNBits"),
    Reason("lax", "only supports interleaved SwiGLU", _NO_KERNEL, "MoE QMoE"),
    Reason("lax", "CreateMelWeightMatrix", "the standard has no least number", "MelWeightMatrix"),
    Reason("lax", "expected to have rank 2|must have rank 1 or 2", "a vector is one sample"),
    Reason(
        "lax",
        r"pool_attributes\.h|invalid channel count|must be positive|nhwc_max_pool\.cc",
        _EMPTY_IMAGES,
    ),
    Reason("lax", "reshape_helper", "a head may have no elements", "Attention", "empty"),
    Reason("lax", "reshape_helper", _EMPTY_IMAGES, "GroupNormalization", "empty"),
    Reason("lax", "has incorrect size", _EMPTY_LIST, damage=r"(strides|dilations|pads) = \[\]"),
    Reason("lax", "'rois' values must be finite", _NON_FINITE, "RoiAlign"),
    Reason("lax", "is NaN", _NON_FINITE, "Binarizer"),
    Reason(
        "lax",
        "out of computation range",
        _NON_FINITE,
        "QLinearGlobalAveragePool QLinearAveragePool",
    ),
    Reason("lax", "spatial_scale_ > 0", "the standard has no range for it", "MaxRoiPool"),
    Reason(
        "lax",
        "iou_threshold must be",
        "a number outside [0, 1] takes all or none",
        "NonMaxSuppression",
    ),
    Reason("lax", "Depth is negative", "a depth of 0 gives no elements", "OneHot"),
    Reason("lax", "must have rank >= 1", "an index alone gives one row", "OneHot"),
    Reason(
        "lax", "empty set with bool", "the least of nothing is true, as 1", "ReduceMin ReduceMax"
    ),
    Reason("lax", "'Linear' mode only supports", _NO_KERNEL, "Resize Upsample"),
    Reason("lax", "write_indices.* negative", "places are taken modulo the cache", "TensorScatter"),
    Reason("lax", "offset_.size", "an offset that is left out is 0", "Scaler"),
    Reason("lax", "tree_ensemble_common", "a vector is one sample", "TreeEnsembleRegressor"),
    Reason(
        "lax",
        "tree_ensemble_common.h:196",
        "thresholds have the dtype of the input",
        "TreeEnsemble",
    ),
    Reason(
        "lax",
        "input index out of range",
        "a negative index counts from the end, as Gather's",
        "EmbedLayerNormalization QEmbedLayerNormalization",
    ),
    Reason(
        "lax",
        "epsilon_ >= 0",
        "the standard's normalizations have no range for it",
        "SkipLayerNormalization SkipSimplifiedLayerNormalization",
    ),
    Reason(
        "lax",
        "Incompatible dimensions",
        "a number besides 0 transposes",
        "TransposeMatMul FusedMatMul",
        "trans(Batch)?[AB] = ",
    ),
    Reason("strict", "a mask or bias of shape", "a mask knows all keys", "Attention QAttention"),
    Reason("strict", "attn_mask has shape", "a mask broadcasts to the scores", "Attention"),
    Reason("strict", "nonpad_kv_seqlen holds", "no length is negative", "Attention"),
    Reason("strict", "does not split into", "all heads have one size", "LinearAttention"),
    Reason("strict", "support vectors|coefficients", "n_supports counts them", "SVMRegressor"),
    Reason("other", "", "the standard numbers softmax 1", "TreeEnsemble", "post_transform = "),
    Reason("other", "", "of equal logits it takes the last ones", "MoE QMoE", r"i1\[all"),
    Reason("other", "", "the mean of no integers is left open", "ReduceMean", "empty|shorter"),
    Reason("other", "", "a sum of no products is 0", "MatMulInteger", "empty"),
    Reason("lax", "fit in the id type", "sums of integers wrap around", "NGramHashMapping"),
    Reason("other", "off by nan", "a matrix without an inverse gives NaN", "Inverse"),
    Reason("strict", "a matrix is [0-9]+ by", "it reads beyond matrices not square", "Inverse"),
    Reason("strict", "indices into no elements", "there is no pixel to sample", "CropAndResize"),
    Reason("values", "", "products overflow or vanish in another order", "ReduceProd", "= 1e-40"),
    Reason(
        "values", "", "rounding over an epsilon of 0", "InstanceNormalization", "n = (0.0|1e-40)"
    ),
    Reason("strict", "spatial_scale is", _NON_FINITE, "RoiAlign"),
    Reason("strict", "output_(height|width) is 0", "there is at least one bin", "RoiAlign"),
    Reason("strict", "pads is .*at least 0", "the standard says 0 and above", "Conv ConvTranspose"),
    Reason("strict", "output_shape is .*at least 0", "no size is negative", "ConvTranspose"),
    Reason("strict", "equation '' is not", "an equation names its operands' axes", "Einsum"),
    Reason("strict", "no elements to pool", "of no numbers there is no largest", "GlobalMaxPool"),
    Reason("strict", "b_scale has shape", "one scale for each column", "MatMulIntegerToFloat"),
    Reason("strict", "do not broadcast", "what is added has the result's sizes", "FusedConv"),
    Reason(
        *("strict", "do not broadcast", "a position for each token", "EmbedLayerNormalization"),
        damage="i8 with a last dimension",
    ),
    Reason(
        *("other", "off by inf where values reach 6.55e", "a masked score is -inf, as in the body"),
        *("Attention", "qk_matmul_output_mode = "),
    ),
    Reason("other", "", "one place lies at -1, as onnx.reference's", "AffineGrid", r"size\[.*= 1$"),
    Reason("lax", "Incompatible dimensions", "no heads attend to none", "Attention", "Q empty"),
    Reason("lax", "at least 1, got 0", "rows without elements need no norm", damage="empty"),
    Reason("lax", "padding values must be non-negative", "no pad is negative", "AveragePool"),
    Reason("strict", "do not broadcast", "the bias is a row", "MatMulIntegerToFloat", "i6 with"),
    Reason("lax", "negative final split", "parts beyond the elements are empty", "Split"),
    Reason("lax", "Single dimension value", "of no strings one empty string is left"),
    Reason("lax", "dynamic_quantize_matmul", "batches of matrices", "MatMulIntegerToFloat"),
    Reason("lax", "Integer overflow", "channels that do not exist add nothing", "LRN", "size = "),
    Reason("other", "", "a variance of 0 over an epsilon of 0", "BatchNormalization", "n = 0.0"),
    Reason(
        "strict",
        "in pairs|must be even|angles for",
        "elements are rotated in pairs",
        "RotaryEmbedding",
    ),
    Reason("strict", "has no end", "steps of 0 reach no limit", "Range"),
    Reason("strict", "has no elements", "of no numbers there is no largest", "ArgMax ArgMin"),
    Reason("strict", "qk_matmul_output_mode|softmax_precision", _STATED, "Attention"),
    Reason("strict", "softcap is (-|nan)", "the standard has 0 for none", "Attention"),
    Reason("strict", "at most 2147483647", _MOST_APART),
    Reason("strict", "size is 0; it must", "a window has at least one place"),
    Reason("strict", "nothing to sample|no elements to take", "no places: no neighbours"),
    Reason("strict", "one-sided DFT requires real", "the standard asks for real numbers", "DFT"),
    Reason("strict", "Invalid number of FFT", "of no numbers there is no spectrum", "DFT"),
    Reason(
        "strict",
        "batch dimensions|batch_dims is -|index tuples of 0",
        "the standard says so",
        "GatherND",
    ),
    Reason("strict", "cannot convert float (NaN|inf)", _NON_FINITE, "GridSample", _EXTREME),
    Reason("strict", "has no length", _NON_FINITE, "Range"),
    Reason("strict", "Maximum allowed size", "there are more numbers than addresses", "Range"),
    Reason("strict", "p is .*above 0", "a p-norm has a p above 0", "LpPool GlobalLpPool"),
    Reason(
        "strict",
        "must be scalar|is 0$|is 0;|is -|is not negative",
        "scalars above 0",
        "MelWeightMatrix",
    ),
    Reason("lax", "k_temp > 0", "0 elements are none", "TopK"),
    Reason("other", "", "the order of elements that are not sorted is open", "TopK", "sorted = 0"),
    Reason("strict", "k is [0-9]{10,}", "there are not so many", "TopK"),
    Reason("strict", "must be a matrix", "the standard says rows of features", "Imputer"),
    Reason(
        *("strict", "intercepts for", "one for each score, or none"),
        "LinearClassifier LinearRegressor",
    ),
    Reason(
        "strict", "expected to have rank 2|needs rank 2", "the standard says so", "TreeEnsemble"
    ),
    Reason(
        "strict",
        "zero-size array|do not broadcast",
        "of no numbers there is no range",
        "DynamicQuantizeMatMul",
    ),
    Reason(
        "strict",
        "indices holds",
        "no row is there; it reads what lies behind",
        "GatherBlockQuantized",
    ),
    Reason("strict", "elements; by N, K", "the attributes say the sizes", "MatMulNBits"),
    Reason(
        "strict",
        "of blocks, but|elements; .* has one|there is no block_size",
        "one scale for all",
        "QLinearSoftmax",
    ),
    Reason(
        "strict", "no elements to pool", "a window has no element to take", "MaxPool NhwcMaxPool"
    ),
    Reason(
        "other",
        "elements differ",
        "which NaN of several is the last is left open",
        "ArgMax ArgMin",
        "longer|twice as long|dimension of 2 more",
    ),
    Reason(
        "other", "other texts", "an empty text is one part, as in Python", "StringSplit", "empty"
    ),
    Reason("other", "other texts", "numbers are written as Python writes them", "Cast"),
    Reason("other", "", "0 divided by 0 is NaN", "Celu", "alpha = 0"),
    Reason(
        "other",
        "",
        "all elements are 0: the scale is 0, by the standard's formula",
        "DynamicQuantizeLinear",
        r"\[all\] = 0|one along|scalar|without dimension|empty",
    ),
    Reason("other", "off by nan", "it divides by a variance of 0", "MeanVarianceNormalization"),
    Reason("other", "int64\\(0, ", "the standard says (0, N) of a scalar", "NonZero"),
    Reason("other", "", "before opset 11 no index counts from the end", "OneHot", "= -"),
    Reason("other", "", "of integers only powers of 0 and above", "Pow", r"= -[0-9]+"),
    Reason("other", "", _OVERFLOW, "Pow", r"= [0-9]{2}"),
    Reason("other", "", "no pad is negative", "AveragePool LpPool MaxPool", "strides = .*[0-9]{6}"),
    Reason("other", r"\(\d+, 1\)|for .*\(\d+,\)", _ONE_NUMBER, "Range"),
    Reason(
        *("other", "", "the largest end of a backward slice is its begin", "Slice"),
        damage="= (-|2147483647)",
    ),
    Reason("values", "", "a window of nothing but pads has no mean", "AveragePool", "pads = "),
    Reason("other", "", _OVERFLOW, "Pow ReduceLogSumExp ReduceProd QGemm", _HUGE),
    Reason("other", "", "exp of integers is computed in double precision", "ReduceLogSumExp"),
    Reason("other", "", _OVERFLOW, "ReduceProd", r"\[all\] = "),
    Reason("other", "float32\\(", "what a body declares of its inputs need not hold", "Loop Scan"),
    Reason("other", "off by", _PAIRS, "QAttention"),
    Reason(
        "other", "", "an empty list of axes names none", "Squeeze", "empty|(axes|i1) one shorter"
    ),
    Reason(
        "other",
        "",
        "other numbers of a mask than 0 and 1 are left open",
        "Attention QAttention",
        r"i[35]\[.*\] = -",
    ),
    Reason(
        "other",
        "",
        "what is divided by a scale of 0 is left open",
        "QLinearMul QLinearAdd",
        "= (0.0|1e-40)",
    ),
    Reason("lax", "dimension size is known", _SHOWN_SIZES),
    Reason("lax", r"'sizes' \(0\) must be same as rank", _SHOWN_SIZES, "Resize"),
    Reason("lax", "does not match the number of axes", _SHOWN_SIZES, "Resize"),
    Reason("lax", "must have the shape set for all outputs", _SHOWN_SIZES, "LinearAttention"),
    Reason("lax", r"GetEffectiveAxes|k tensor should be a 1D|squeeze\.h", _ONE_NUMBER),
    Reason("lax", "K input must be a one-dimensional", _ONE_NUMBER, "TopK"),
    Reason("lax", "frame_length input must be scalar", _ONE_NUMBER, "STFT"),
    Reason("lax", "inferred=1 declared=0|should be scalars", _ONE_NUMBER, "Range"),
    Reason("lax", "must be greater than zero", "a signal is filled up with zeros", "DFT"),
    Reason("strict", "indices into no elements", "no index names one of none", "GatherND"),
    Reason("lax", "singleton 1D tensor", _ONE_NUMBER, "LabelEncoder"),
    Reason("lax", "Scale and Zero-point must be a scalar", _ONE_NUMBER),
    Reason(
        "lax",
        "input b should have same shape size",
        "one zero point may serve all columns",
        "QGemm",
    ),
    Reason(
        "lax",
        "IsScalarOr1Element",
        "rows may have zero points of their own, as MatMulInteger's",
        "MatMulIntegerToFloat",
    ),
    Reason(
        "lax",
        "quantize_linear|QLinearMatMul",
        "one scale may have any rank, and rows scales of their own",
    ),
    Reason(
        "lax",
        r"must be in \[-rank|Input rank must be|on a scalar|Input rank was 0|axis must be in"
        r"|valid range \[-0,-1\]",
        "a scalar counts as one axis of one element",
    ),
    Reason(
        "lax",
        "size_ % 2|alpha_ > 0|beta_ > 0|NumDimensions\\(\\) == 4",
        "the standard asks for none",
        "LRN",
    ),
    Reason("lax", "min_ <= max_", "of bounds in reverse order the upper one holds", "Clip"),
    Reason("lax", "Pad reflect", "what is reflected repeats, as in NumPy"),
    Reason("lax", "zero effective input extent", "an empty axis without pads needs no edge", "Pad"),
    Reason("lax", "zero points shape and scales", "two zero points of 4 bits share a byte"),
    Reason("lax", "is expected to have", "it takes fewer ranks; sums and scales broadcast here"),
    Reason(
        "strict", "conditions for", "a condition behind the last slice selects nothing", "Compress"
    ),
    Reason("lax", "attention_helper", "a mask may know fewer keys than there are", "Attention"),
    Reason(
        *("lax", "must be less than max|output_shape is inconsistent"),
        *("output_shape says the sizes", "ConvTranspose"),
    ),
    Reason(
        "lax",
        "number of inferred and declared|Can't merge shape info|OutputMLValue",
        "what a body declares of its inputs need not hold",
        "Loop Scan SequenceMap",
    ),
    Reason("lax", "Invalid dim0_offset", "a list without items takes no iteration", "Scan"),
    Reason("lax", "", "the dtype of an empty sequence decides nothing", "SequenceEmpty"),
    Reason("lax", "hidden_size", "the weights say it too", "LSTM GRU RNN"),
    Reason(
        *("lax", "GetAttr|No attribute with", "an attribute that is left out has its default"),
        *("RegexFullMatch LabelEncoder FusedGemm", "without"),
    ),
    Reason("lax", "feature size", "features are the last axis", "Scaler Imputer"),
    Reason("lax", "Failed to allocate", "it has less memory"),
    Reason("lax", "one-dim tensor", "the value is one number of any rank", "ConstantOfShape"),
    Reason(
        "lax",
        "ngram_indexes|ngram_counts|items",
        "places behind the last n-gram are not used",
        "TfIdfVectorizer",
    ),
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

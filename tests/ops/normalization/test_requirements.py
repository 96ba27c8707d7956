"""Softmax and normalizations refuse operands that do not fit, on every device."""

from __future__ import annotations

import numpy as np

from tests.support.requirements import Use, floats, refused, taken

X = floats(2, 6, 4, 5)
FOUR = (floats(6), floats(6), floats(6), floats(6) ** 2)
WRONG = [
    Use("Softmax", [X], {"axis": 4}),
    Use("Softmax", [X], {"axis": -(2**63)}),
    Use("Softmax", [floats(3)], version=11),
    Use("LogSoftmax", [X], {"axis": -5}),
    Use("Hardmax", [X], {"axis": 2**63 - 1}),
    Use("LayerNormalization", [X, floats(4), floats(5)], version=17),
    Use("LayerNormalization", [X, floats(5), floats(6)]),
    Use("LayerNormalization", [X, floats(0)]),
    Use("LayerNormalization", [X, floats(1, 1, 1, 1, 5)]),
    Use("LayerNormalization", [X, floats(5)], {"axis": 4}),
    Use("LayerNormalization", [floats(), floats(1)]),
    Use("RMSNormalization", [X, floats(4)]),
    Use("RMSNormalization", [X, floats(3, 1, 6, 4, 5)]),
    Use("InstanceNormalization", [X, floats(1), floats(6)]),
    Use("InstanceNormalization", [X, floats(6), floats(5)], version=6),
    Use("InstanceNormalization", [X, floats(6, 1), floats(6)]),
    Use("InstanceNormalization", [floats(6), floats(6), floats(6)]),
    Use("GroupNormalization", [X, floats(6), floats(3)], {"num_groups": 3}),
    Use("GroupNormalization", [X, floats(3), floats(3)], {"num_groups": 3}),
    Use("GroupNormalization", [X, floats(6), floats(6)], {"num_groups": 4}),
    Use("GroupNormalization", [X, floats(6), floats(6)], {"num_groups": 0}),
    Use("GroupNormalization", [X, floats(6), floats(6)], {"num_groups": -3}),
    Use("GroupNormalization", [X, floats(3), floats(2)], {"num_groups": 3}, version=18),
    Use("GroupNormalization", [X, floats(2), floats(2)], {"num_groups": 3}, version=18),
    *(
        Use("BatchNormalization", [X, *FOUR[:k], wrong, *FOUR[k + 1 :]], version=version)
        for k in range(4)
        for wrong in (floats(1), floats(5), floats(7), floats(0), floats(6, 1))
        for version in (9, 15)
        if version == 15 or k == 0
    ),
    Use("BatchNormalization", [floats(6), *FOUR]),
    Use("BatchNormalization", [X, *FOUR], {"spatial": 0}, version=7),
    Use("LRN", [X], {"size": 0}),
    Use("LRN", [X], {"size": -3}),
    Use("LRN", [floats(6)], {"size": 3}),
    Use("LpNormalization", [X], {"axis": 4}),
    Use("LpNormalization", [X], {"p": 3}),
    Use("MeanVarianceNormalization", [X], {"axes": (0, 4)}),
    Use("MeanVarianceNormalization", [X], {"axes": (0, -4)}),
    Use("MeanVarianceNormalization", [floats(2, 6, 5)]),
]
RIGHT = [
    Use("Softmax", [floats(3)], {"axis": 0}, version=11),
    Use("LayerNormalization", [X, floats(1, 1, 5), floats(4, 5)], {"axis": 2}),
    Use("RMSNormalization", [X, floats(1)], {"axis": 1}),
    Use("InstanceNormalization", [floats(2, 6, 7), floats(6), floats(6)]),
    Use("GroupNormalization", [X, floats(3), floats(3)], {"num_groups": 3}, version=18),
    Use("GroupNormalization", [X, floats(6), floats(6)], {"num_groups": 3}),
    Use("BatchNormalization", [floats(7), floats(1), floats(1), floats(1), floats(1) ** 2]),
    Use("LRN", [floats(2, 6, 5)], {"size": 2**40 + 1}),
    Use("LRN", [X], {"size": 4}),
    Use("MeanVarianceNormalization", [X], {"axes": (-1, 0)}),
    Use("MeanVarianceNormalization", [X.astype(np.float64)]),
    Use("LogSoftmax", [floats()]),
    Use("Softmax", [floats()], {"axis": 0}, version=11),
]

test_operands_that_do_not_fit_are_refused = refused(WRONG)
test_operands_that_fit_are_taken = taken(RIGHT)

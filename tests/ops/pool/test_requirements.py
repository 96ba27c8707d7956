"""Pools refuse operands that do not fit."""

from __future__ import annotations

import numpy as np

import subgraph as sg
from tests.support.requirements import DEVICES, Use, bytes_of, empty, floats, refused, taken

X = floats(2, 6, 7, 8)
HUGE = 2**62
LONG = 2**31 - 1
WRONG = [
    Use("MaxPool", [X], {"kernel_shape": (8, 1)}),
    Use("MaxPool", [X], {"kernel_shape": (2,)}),
    Use("MaxPool", [X], {"kernel_shape": (0, 1)}),
    Use("MaxPool", [X], {"kernel_shape": (2, 2), "strides": (0, 1)}),
    Use("MaxPool", [X], {"kernel_shape": (2, 2), "pads": (0, 0, 0, -1)}),
    Use("MaxPool", [X], {"kernel_shape": (2, 2), "dilations": (HUGE, 1)}),
    Use("MaxPool", [X], {"kernel_shape": (2, 2), "storage_order": -1}, outputs=2),
    Use("MaxPool", [floats(6, 7)], {"kernel_shape": ()}),
    Use("AveragePool", [X], {"kernel_shape": (2, 2, 2)}),
    Use("AveragePool", [X], {"kernel_shape": (2, 2), "auto_pad": "same"}),
    Use("LpPool", [X], {"kernel_shape": (2, 2), "p": 0}),
    Use("GlobalMaxPool", [floats(2, 6, 0, 3)]),
    Use("GlobalAveragePool", [floats(6)]),
    Use("GlobalLpPool", [X], {"p": -1}),
]
EXTREME = [
    Use("MaxPool", [X], {"kernel_shape": (2, 2), "strides": (LONG, LONG)}),
    Use("MaxPool", [X], {"kernel_shape": (1, 1), "dilations": (LONG, LONG)}),
    Use("MaxPool", [X], {"kernel_shape": (2, 2), "strides": (LONG, 3), "ceil_mode": 1}, outputs=2),
    Use("MaxPool", [bytes_of(2, 6, 7, 8)], {"kernel_shape": (2, 2), "strides": (LONG, LONG)}),
    Use("AveragePool", [X], {"kernel_shape": (3, 3), "strides": (1, LONG), "pads": (1, 1, 1, 1)}),
    Use("AveragePool", [floats(1, 3, 9)], {"kernel_shape": (3,), "strides": (LONG,)}),
    Use("LpPool", [X], {"kernel_shape": (7, 8), "strides": (LONG, LONG)}),
]
NONE = [
    *(
        Use(op, [floats(*shape)])
        for op in ("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
        for shape in ((0, 2, 4, 4), (1, 0, 4, 4))
    ),
    *(
        Use("MaxPool", [floats(*shape)], {"kernel_shape": (2, 2)}, outputs=2)
        for shape in ((0, 2, 4, 4), (1, 0, 4, 4))
    ),
]

test_operands_that_do_not_fit_are_refused = refused(WRONG)
test_attributes_may_be_extreme = taken(EXTREME, DEVICES[1:], 1e-4)
test_no_images_give_no_results = empty(NONE)


def test_maxima_of_padding_alone_have_no_index() -> None:
    x = sg.input("x", ("n", 1, "h", "w"), "float32")
    attrs = {"kernel_shape": (2, 5), "pads": (2, 2, 2, 2)}
    node = sg.Node("MaxPool", [x], outputs=2, version=12, attrs=attrs)
    graph = sg.Graph([x], node.outputs)
    array = np.arange(1, 26, dtype=np.float32).reshape(1, 1, 5, 5)
    wanted, found = (sg.compile_model(graph, device)(x=array) for device in ("REFERENCE", "CPU"))
    for k in range(2):
        np.testing.assert_array_equal(found[k], wanted[k])

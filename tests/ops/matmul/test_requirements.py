"""Matrix products refuse operands that do not fit, on every device."""

from __future__ import annotations

import numpy as np
import pytest

from subgraph.graph.types import numpy_dtype
from tests.support.requirements import DEVICES, Use, assert_refused, floats, refused, run, taken

A, B = floats(3, 4), floats(4, 5)
WRONG = [
    *(
        Use("MatMul", [a, b])
        for a, b in (
            (A, floats(5, 5)),
            (A, floats(3, 5)),
            (A, floats(0, 5)),
            (A, floats(3)),
            (A, floats()),
            (floats(), B),
            (floats(3), B),
            (floats(2, 3, 4), floats(3, 4, 5)),
            (floats(2, 1, 3, 4), floats(3, 1, 4, 5)),
            (A, B.astype(np.float64)),
        )
    ),
    *(
        Use("Gemm", list(given), attributes)
        for given, attributes in (
            ((A, floats(3, 5)), {}),
            ((A, floats(5, 4)), {}),
            ((A, B), {"transA": 1}),
            ((A, B), {"transB": 1}),
            ((floats(4), B), {}),
            ((floats(1, 3, 4), B), {}),
            ((A, floats(4)), {}),
            ((A, B, floats(4)), {}),
            ((A, B, floats(6)), {}),
            ((A, B, floats(0)), {}),
            ((A, B, floats(3)), {}),
            ((A, B, floats(5, 3)), {}),
            ((A, B, floats(2, 5)), {"beta": 0.5}),
            ((A, B, floats(5, 1)), {}),
            ((A, B, floats(1, 3, 5)), {}),
            ((floats(1, 4), B, floats(3, 5)), {}),
            ((A, floats(4, 1), floats(3, 4)), {}),
            ((A, B, floats(5).astype(np.float64)), {}),
        )
    ),
    *(
        Use("Einsum", list(given), {"equation": equation})
        for equation, given in (
            ("", (floats(),)),
            ("ij,jk->ik", (A, floats(5, 2))),
            ("ij,jk->ik", (A,)),
            ("ij,jk->ik", (A, B, B)),
            ("ij,jk->ik", (A, floats(4))),
            ("ij,jk->ik", (A, floats(0, 5))),
            ("ij,jk->iz", (A, B)),
            ("ij,jk->ii", (A, B)),
            ("...j,jk->...k", (A, floats(5, 2))),
            ("...j,...j->...", (floats(2, 3, 4), floats(5, 3, 4))),
            ("ii->i", (A,)),
            ("ij,ji->", (A, floats(4, 2))),
            ("...ij,...jk->...ik", (floats(2, 3, 4), floats(4, 5))),
        )
    ),
]
RIGHT = [
    Use("MatMul", [floats(2, 1, 3, 4), floats(5, 4, 2)]),
    Use("MatMul", [floats(4), B]),
    Use("MatMul", [floats(3, 0), floats(0, 5)]),
    Use("Gemm", [A, B, floats(3, 1)]),
    Use("Gemm", [A, B, floats()], {"beta": 0.5}),
    Use("Gemm", [floats(4, 3), floats(5, 4), floats(1, 5)], {"transA": 1, "transB": 1}),
    Use("Einsum", [A, B], {"equation": "ij, jk"}),
    Use("Einsum", [floats(2, 3, 4), floats(1, 4, 5)], {"equation": "...ij,...jk->...ik"}),
    Use("Einsum", [floats(1, 3, 4), floats(2, 5, 4)], {"equation": "bid,bjd->bij"}),
]

test_operands_that_do_not_fit_are_refused = refused(WRONG)


@pytest.mark.parametrize("device", DEVICES)
def test_matrices_without_determinant_are_refused(device: str) -> None:
    assert_refused(Use("Det", [floats(2, 3)]), device, "2 by 3")


test_operands_that_fit_are_taken = taken(RIGHT)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_determinants_of_half_precision(dtype: str) -> None:
    x = np.array([[[2, 1], [1, 3]], [[4, 0], [2, 1]]]).astype(numpy_dtype(dtype))
    for device in DEVICES:
        (found,) = run(Use("Det", [x]), device)
        assert found.dtype == x.dtype
        np.testing.assert_allclose(found.astype(np.float32), [5, 4], rtol=1e-2)

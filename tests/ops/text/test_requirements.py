"""Operators on text refuse operands that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.requirements import Use, ints, refused

WORDS = np.array(["a", "b c"], object)
POOL: dict[str, Any] = {
    "mode": "TF",
    "min_gram_length": 1,
    "max_gram_length": 10**9,
    "max_skip_count": 0,
    "ngram_counts": (5,),
    "ngram_indexes": (0,),
    "pool_int64s": (1,),
}
WRONG: list[tuple[Use, str]] = [
    (Use("StringConcat", (WORDS, WORDS[:0])), "do not broadcast"),
    (Use("TfIdfVectorizer", (ints(1, 2),), POOL), "do not fit a pool"),
]

test_wrong_operands_are_refused = refused(WRONG)

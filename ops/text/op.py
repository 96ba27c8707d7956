"""Operators on strings: requirements and reference.

onnx.reference stores strings in arrays of fixed-width elements, as wide as the longest, and lets a
model set the locale of the process. Its TfIdfVectorizer searches a tree in Python, and does not
check the pool's indices; here n-grams are keys of a table, and wrong indices are errors.
"""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import attrs
import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph.graph import Node
from subgraph.graph.limits import check_memory
from subgraph.graph.types import Array, TensorType, ValueType
from subgraph.operators.functions import declare_contributed
from subgraph.operators.operator import declare
from subgraph.operators.reference import attributes
from subgraph.operators.requirements import (
    Tensor,
    decoded,
    require,
    require_broadcast_together,
    require_choice,
    require_dtype,
    require_rank,
    require_whole_number,
)
from subgraph.ops.ml.scores import prepared

from .patterns import compiled, regex_full_match, splitter_of, tokenizer


@attrs.frozen(eq=False)
class Pool:
    """The n-grams of a TfIdfVectorizer, as a tree of their words.

    Words have numbers from 1 on, in each of the following positions of an n-gram also its beginning
    up to there; 0 is a word, or a beginning, that no n-gram has.

    Attributes:
        words: Number of each word.
        table: Numbers of the whole numbers from ``least - 1`` on, if they are close to each other.
        least: The least of the pool's whole numbers.
        keys: For the second and each later position the sorted keys of beginnings: the number of
            the beginning before it, times the count of words plus 1, plus the number of the word.
        columns: For each position the column of the output that counts a beginning, by its number;
            -1 for one that is no whole n-gram.
        lengths: Least and most words of an n-gram.
        width: Columns of the output.
        weights: One for each column, or empty. The attribute has one for each n-gram of the pool,
            as the standard says; onnx.reference takes them for those of columns.
    """

    words: dict[Any, int]
    table: Array | None
    least: int
    keys: list[Array]
    columns: list[Array]
    lengths: tuple[int, int]
    width: int
    weights: Array

    def numbers(self, x: Array) -> Array:
        """Return the number of each word."""
        if self.table is None:
            numbers = map(self.words.get, x.reshape(-1).tolist(), itertools.repeat(0))
            return np.fromiter(numbers, np.int64, x.size).reshape(x.shape)
        first = self.least - 1
        found: Array = self.table[np.clip(x, first, first + self.table.size - 1) - first]
        return found

    def longer(self, k: int, beginnings: Array, words: Array) -> Array:
        """Return the numbers of beginnings with the word at position ``k`` behind them."""
        keys = self.keys[k - 1]
        wanted = beginnings * (len(self.words) + 1) + words
        places = np.searchsorted(keys, wanted)
        exists = keys[np.minimum(places, keys.size - 1)] == wanted
        return np.where(exists, places + 1, 0)


# Whole numbers in a range of at most so many are found by a table of 8 MiB, others by a dictionary.
_MAX_TABLE = 1 << 20


def pool_of(node: Node) -> Pool:
    """Return the n-grams of a TfIdfVectorizer.

    Raises:
        ShapeError: Its attributes contradict each other.
    """
    options = attributes(node)
    integers = [int(word) for word in options["pool_int64s"] or ()]
    pool: Sequence[Any] = integers or [decoded(word) for word in options["pool_strings"] or ()]
    starts = [*(int(n) for n in options["ngram_counts"]), len(pool)]
    if any(a > b for a, b in itertools.pairwise([0, *starts])):
        raise ShapeError(f"ngram_counts {starts[:-1]} do not fit a pool of {len(pool)} words")
    indexes = [int(n) for n in options["ngram_indexes"]]
    width = max(indexes, default=0) + 1
    if min(indexes, default=0) < 0:
        raise ShapeError(f"ngram_indexes begin at {min(indexes)}; they must not be negative")
    check_memory(width * 16, f"a row of counts for ngram_indexes up to {width - 1}")
    weights = np.array(options["weights"] or (), np.float32)
    if 0 < weights.size < len(indexes):
        raise ShapeError(f"{weights.size} weights for {len(indexes)} n-grams")
    if weights.size:
        by_column = np.ones(width, np.float32)
        by_column[indexes] = weights[: len(indexes)]
        weights = by_column
    lengths = int(options["min_gram_length"]), int(options["max_gram_length"])
    if not 1 <= lengths[0] <= lengths[1]:
        raise ShapeError(f"min_gram_length is {lengths[0]}, max_gram_length {lengths[1]}")
    words: dict[Any, int] = {}
    for word in pool:
        words.setdefault(word, len(words) + 1)
    codes = np.fromiter((words[word] for word in pool), np.int64, len(pool))
    grams: list[tuple[Array, list[int]]] = []  # words and columns of the n-grams of each length
    number = 0
    for size, (start, end) in enumerate(itertools.pairwise(starts), 1):
        if (end - start) % size:
            raise ShapeError(f"{end - start} words of the pool do not make {size}-grams")
        count = (end - start) // size
        if number + count > len(indexes):
            raise ShapeError(f"ngram_indexes has {len(indexes)} entries, the pool more n-grams")
        if not lengths[0] <= size <= lengths[1]:
            grams.append((np.zeros((0, size), np.int64), []))
        else:
            columns = indexes[number : number + count]
            grams.append((codes[start:end].reshape(-1, size), columns))
        number += count
    table, least = _table(integers, words)
    return Pool(words, table, least, *_tree(grams, len(words)), lengths, width, weights)


def _table(integers: Sequence[int], words: dict[Any, int]) -> tuple[Array | None, int]:
    """Return `Pool.table` and `Pool.least`."""
    least, most = min(integers, default=0), max(integers, default=0)
    if not integers or most - least > _MAX_TABLE or max(-least, most) >= 1 << 30:
        return None, 0
    table = np.zeros(most - least + 3, np.int64)
    table[np.fromiter(words, np.int64) - (least - 1)] = np.fromiter(words.values(), np.int64)
    return table, least


def _tree(grams: Sequence[tuple[Array, list[int]]], words: int) -> tuple[list[Array], list[Array]]:
    """Return `Pool.keys` and `Pool.columns` of the n-grams of each length."""
    keys: list[Array] = []
    columns: list[Array] = []
    beginnings = [codes[:, 0] for codes, _ in grams]
    for k, (_, ends) in enumerate(grams):
        count = words
        if k:
            longer = [
                begun * (words + 1) + codes[:, k]
                for begun, (codes, _) in zip(beginnings[k:], grams[k:], strict=True)
            ]
            keys.append(np.unique(np.concatenate(longer)))
            beginnings[k:] = [np.searchsorted(keys[-1], found) + 1 for found in longer]
            count = keys[-1].size
        columns.append(np.full(count + 1, -1))
        columns[-1][beginnings[k]] = ends
    while keys and not keys[-1].size:  # no n-gram is as long
        keys.pop()
        columns.pop()
    return keys, columns


def tfidf_vectorizer(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return how often each n-gram of the pool occurs in a row of words, or its weight."""
    options, x = attributes(node), inputs[0]
    pool = prepared(node, pool_of)
    skip, mode = int(options["max_skip_count"]), decoded(options["mode"])
    if x.ndim == 2 and not len(x):
        raise ShapeError(f"words of shape {list(x.shape)}; they are one row or several")
    lines = pool.numbers(x if x.ndim == 2 else x.reshape(1, -1))
    check_memory(len(lines) * pool.width * 16, f"{len(lines)} rows of {pool.width} counts")
    counts: Array = np.zeros(len(lines) * pool.width, np.int64)
    rows = pool.width * np.arange(len(lines))[:, None]
    for columns in _columns_of_ngrams(pool, lines, skip):
        found = (columns + rows)[columns >= 0]
        counts += np.bincount(found, minlength=counts.size)
    counts = counts.reshape((*x.shape[:-1], pool.width))
    if mode == "IDF":
        counts = counts > 0
    if mode != "TF" and pool.weights.size:
        counts = counts * pool.weights
    return [counts.astype(np.float32)]


def _columns_of_ngrams(pool: Pool, lines: Array, skip: int) -> Iterable[Array]:
    """Yield the columns of the n-grams of rows of words, -1 for those that are not in the pool.

    Args:
        pool: The n-grams.
        lines: Rows of the words' numbers.
        skip: Words that may be left out between two of an n-gram, the same number everywhere.
    """
    size = lines.shape[1]
    if pool.lengths[0] <= 1 and pool.columns:
        yield pool.columns[0][lines]
    for distance in range(1, min(skip, size) + 2 if pool.keys else 1):
        beginnings = lines
        for k in range(1, len(pool.columns)):
            # Each word with those at its multiples of the distance.
            end = k * distance
            if end >= size:
                break
            beginnings = pool.longer(k, beginnings[:, : size - end], lines[:, end:])
            if k + 1 >= pool.lengths[0]:
                yield pool.columns[k][beginnings]


def _lengths(texts: Array) -> Array:
    return np.array([len(item) for item in texts.reshape(-1)], np.int64).reshape(texts.shape)


def string_concat(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the strings of two arrays, which broadcast, concatenated."""
    a, b = (value.astype(object) for value in inputs)
    check_memory(float((_lengths(a) + _lengths(b)).sum()), "the concatenation of texts")
    return [np.asarray(a + b, dtype=object)]


def string_split(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the parts of each string, padded by "", and the number of parts."""
    options, x = attributes(node), inputs[0].astype(object)
    delimiter = decoded(options["delimiter"] or "") or None
    most = -1 if options["maxsplit"] is None else int(options["maxsplit"])
    parts = [item.split(delimiter, most) for item in x.reshape(-1)]
    counts = np.array([len(part) for part in parts], np.int64)
    width = int(counts.max(initial=0))
    check_memory(8 * x.size * width, f"{x.size} texts with up to {width} parts")
    found = np.full((x.size, width), "", dtype=object)
    for row, part in zip(found, parts, strict=True):
        row[: len(part)] = part
    return [found.reshape((*x.shape, width)), counts.reshape(x.shape)]


def string_normalizer(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return strings without accents and stopwords, in upper or lower case, without empty ones.

    The attribute ``locale`` is not used: Python's case mapping does not depend on it.
    """
    options, x = attributes(node), inputs[0].astype(object)
    changed = {"LOWER": str.lower, "UPPER": str.upper}.get(
        decoded(options["case_change_action"]), str
    )
    stopwords = {decoded(word) for word in options["stopwords"] or ()}
    exact = bool(options["is_case_sensitive"])
    stopwords = stopwords if exact else set(map(changed, stopwords))
    found: list[str] = []
    for item in x.reshape(-1):
        word = _without_accents(item)
        word = _without(word, stopwords) if exact else word
        word = changed(word)
        found.append(word if exact else _without(word, stopwords))
    found = [word for word in found if word] or [""]
    return [np.array(found, dtype=object).reshape((1,) * (x.ndim - 1) + (-1,))]


def _without(words: str, stopwords: AbstractSet[str]) -> str:
    return (
        " ".join(word for word in words.split(" ") if word not in stopwords) if stopwords else words
    )


def _without_accents(word: str) -> str:
    if word.isascii():
        return word
    return "".join(c for c in unicodedata.normalize("NFKD", word) if not unicodedata.combining(c))


def string_concat_operands(node: Node, x: Tensor, y: Tensor) -> None:
    """Raise ShapeError unless two tensors of strings broadcast (ONNX, 20).

    Args:
        node: The StringConcat.
        x: Strings.
        y: Strings.
    """
    require_dtype("X", x, "string")
    require_dtype("Y", y, "string")
    require_broadcast_together(x, y)


def regex_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless X holds strings and ``pattern`` is one of RE2 (ONNX, 20)."""
    require_dtype("X", x, "string")
    compiled(decoded(node.attrs.get("pattern", "")))


def string_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless the input holds strings (ONNX, 20)."""
    require_dtype("X", x, "string")


def normalizer_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless the input is one row of strings (ONNX, 10)."""
    require_dtype("X", x, "string")
    require_choice(node, "case_change_action", "NONE", "LOWER", "UPPER", "NONE")
    require_rank("X", x, 1, 2)
    require(x.rank == 1 or x.shape[0] == 1, "X has shape {}; it is one row", list(x.shape))


def tfidf_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless the attributes fit each other, and X has rank 2 or less (ONNX, 9)."""
    prepared(node, pool_of)
    require_choice(node, "mode", "", "TF", "IDF", "TFIDF")
    require_whole_number(node, "max_skip_count", least=0)
    require_rank("X", x, 0, 1, 2)


def tokenizer_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless X is a vector or matrix of strings and the attributes fit."""
    require_dtype("X", x, "string")
    require_rank("X", x, 1, 2)
    prepared(node, splitter_of)
    require_whole_number(node, "mincharnum", least=1)


def tokenizer_types(
    node: Node, types: Sequence[ValueType | None], known: Sequence[Array | None]
) -> list[ValueType | None]:
    """Return strings with one axis more, whose length depends on the strings."""
    (x,) = types
    shape = x.shape if isinstance(x, TensorType) else None
    return [TensorType("string", None if shape is None else (*shape, None))]


# Constants of MurmurHash3_x86_32 (Appleby, https://github.com/aappleby/smhasher).
_HASH_FACTORS = np.uint32(0xCC9E2D51), np.uint32(0x1B873593)
_HASH_MIX = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)


def murmur_hash(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the MurmurHash3_x86_32 of each number's bytes, or of each string's UTF-8 bytes."""
    options, x = attributes(node), inputs[0]
    flat = x.reshape(-1)
    dtype = np.uint32 if options["positive"] == 1 else np.int32
    seed = np.uint32(int(options["seed"]) & 0xFFFFFFFF)
    if x.dtype == object or x.dtype.kind in "UST":
        texts = [str(text).encode() for text in flat]
        lengths = np.array(list(map(len, texts)), np.int64)
        found = np.empty(flat.size, np.uint32)
        for length in np.unique(lengths):  # texts of one length are hashed together
            rows = np.flatnonzero(lengths == length)
            content = np.frombuffer(b"".join([texts[row] for row in rows]), np.uint8)
            found[rows] = _murmur(content.reshape(rows.size, length), seed)
        return [found.view(dtype).reshape(x.shape)]
    content = np.ascontiguousarray(flat).view(np.uint8).reshape(flat.size, x.dtype.itemsize)
    return [_murmur(content, seed).view(dtype).reshape(x.shape)]


def _murmur(content: Array, seed: np.uint32) -> Array:
    """Return the hash of each row of bytes."""
    rows, length = content.shape
    padded = np.zeros((rows, -(-length // 4) * 4), np.uint8)
    padded[:, :length] = content
    words = padded.view("<u4")
    found = np.full(rows, seed, np.uint32)
    for number, word in enumerate(words.T):
        term = _rotated(word * _HASH_FACTORS[0], 15) * _HASH_FACTORS[1]
        found ^= term
        if number < length // 4:  # the last, incomplete word is only added
            found = _rotated(found, 13) * np.uint32(5) + np.uint32(0xE6546B64)
    found ^= np.uint32(length)
    for shift, factor in zip((16, 13), _HASH_MIX, strict=True):
        found = (found ^ (found >> np.uint32(shift))) * factor
    found ^= found >> np.uint32(16)
    return found


def _rotated(words: Array, bits: int) -> Array:
    return (words << np.uint32(bits)) | (words >> np.uint32(32 - bits))


def murmur_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless the input holds strings, or numbers of 4 or 8 bytes."""
    require_dtype("X", x, "string", "uint32", "int32", "uint64", "int64", "float32", "float64")


def murmur_types(
    node: Node, types: Sequence[ValueType | None], known: Sequence[Array | None]
) -> list[ValueType | None]:
    """Return one hash for each element."""
    (x,) = types
    dtype = "uint32" if node.attrs.get("positive", 1) == 1 else "int32"
    return [TensorType(dtype, x.shape if isinstance(x, TensorType) else None)]


declare_contributed(
    "MurmurHash3",
    "X -> Y",
    attributes={"positive": 1, "seed": 0},
    compute=murmur_hash,
    infer=murmur_types,
    requires=murmur_operands,
)
declare_contributed(
    "Tokenizer",
    "X -> Y",
    attributes={
        **{"mark": "int!", "mincharnum": "int!", "pad_value": "string!"},
        **{"separators": "strings", "tokenexp": "string"},
    },
    compute=tokenizer,
    infer=tokenizer_types,
    requires=tokenizer_operands,
)
# The operators of the standard, each in all its versions.
declare("RegexFullMatch", requires=regex_operands, compute=regex_full_match)
declare("StringConcat", requires=string_concat_operands, compute=string_concat)
declare("StringNormalizer", requires=normalizer_operands, compute=string_normalizer)
declare("StringSplit", requires=string_operands, compute=string_split)
declare("TfIdfVectorizer", requires=tfidf_operands, compute=tfidf_vectorizer)

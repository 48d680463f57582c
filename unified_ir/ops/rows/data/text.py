"""Rows over strings, and counts of n-grams of words or numbers; none has a gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.types import ShapeError, TensorType, bool_, float32, int64, string
from triplane.unified_ir.ops.row import Op, OpCall, OpKind
from triplane.unified_ir.ops.rows.arithmetic.elementwise import broadcast_same
from triplane.unified_ir.ops.rows.data.regex import automaton
from triplane.unified_ir.ops.samples import fixed, sample

Types = tuple[TensorType, ...]


def words(*texts: str) -> Any:
    """Make a vector of strings."""
    return fixed(np.array(texts, np.object_))


string_concat = Op(
    name="StringConcat",
    kind=OpKind.DATA,
    infer=broadcast_same,
    samples=(
        sample(words("a", "é"), words("b", "")),
        sample(fixed(np.array([["x"], ["y"]], np.object_)), words("1", "2", "3")),
    ),
)


def _split_types(call: OpCall) -> Types:
    x = call.type(0)
    return (x.with_shape((*x.shape, call.opened())), x.with_dtype(int64))[: call.outputs]


def _split(x: Any, *, delimiter: str | None, maxsplit: int | None) -> tuple[Any, Any]:
    """Split as Python does: without a delimiter at blanks; an empty string has no parts."""
    how = (delimiter or None, -1 if maxsplit is None else maxsplit)
    parts = {at: x[at].split(*how) if x[at] else [] for at in np.ndindex(x.shape)}
    widest = max(map(len, parts.values()), default=0)
    texts = np.full((*x.shape, widest), "", np.object_)
    counts = np.zeros(x.shape, np.int64)
    for at, part in parts.items():
        texts[at][: len(part)] = part
        counts[at] = len(part)
    return texts, counts


string_split = Op(
    name="StringSplit",
    kind=OpKind.DATA,
    data_dependent_dims=1,
    infer=_split_types,
    reference=_split,
    samples=(
        sample(words("a b  c", "d"), outputs=2),
        sample(words("a,b,c", "d"), outputs=2, delimiter=",", maxsplit=1),
    ),
)
"""The parts of each string, padded with empty strings to the longest row, and their numbers."""


def _match_types(call: OpCall) -> Types:
    if call.attrs["pattern"] is None:
        raise InvalidInput("RegexFullMatch needs a pattern")
    automaton(call.attrs["pattern"])  # refuses a pattern that cannot be matched in linear time
    return (call.type(0).with_dtype(bool_),)


def _full_match(x: Any, *, pattern: str) -> Any:
    matches = [automaton(pattern).matches(text) for text in x.reshape(-1)]
    return np.array(matches, np.bool_).reshape(x.shape)


regex_full_match = Op(
    name="RegexFullMatch", kind=OpKind.DATA,
    infer=_match_types,
    reference=_full_match,
    samples=(
        sample(words("www.google.com", "www.facebook.com", "www.bbc.co.uk"),
               pattern=r"www\.[\w.-]+\.com"),
        sample(fixed(np.array([["ab", "aab"], ["b", ""]], np.object_)), pattern="(a+b|c{2,3})?"),
    ),
)  # fmt: skip


def _normalizer_types(call: OpCall) -> Types:
    x, attrs = call.type(0), call.attrs
    if x.rank > 2 or not x.rank or (x.rank == 2 and x.shape[0] != 1):
        raise ShapeError(f"{call.row} takes strings (C,) or (1, C), got {x}")
    if attrs["case_change_action"] not in _CASES:
        raise InvalidInput(f"case_change_action of {call.row} must be one of {', '.join(_CASES)}")
    return (x.with_shape((*x.shape[:-1], call.opened())) if attrs["stopwords"] else x,)


_CASES: Final[Mapping[str, Any]] = {"NONE": str, "LOWER": str.lower, "UPPER": str.upper}


def _normalize(
    x: Any, *, case_change_action: str, is_case_sensitive: int, stopwords: Sequence[str] | None,
    locale: str | None,
) -> Any:  # fmt: skip
    """Remove stop words and change case; return one empty string if nothing is left.

    Cases are Unicode's, whatever the locale; onnxruntime needs one that its machine has.
    """
    fold = str if is_case_sensitive else str.lower
    stop = {fold(word) for word in stopwords or ()}
    change = _CASES[case_change_action]
    # ONNX: if every string is a stop word, the output is one empty string.
    cased = [change(t) for t in x.reshape(-1) if fold(t) not in stop] or [""] * bool(stop)
    return np.array(cased, np.object_).reshape((*x.shape[:-1], len(cased)))


_DAYS = words("monday", "Tuesday", "WEDNESDAY")
string_normalizer = Op(
    name="StringNormalizer",
    kind=OpKind.DATA,
    data_dependent_dims=lambda call: int(bool(call.attrs["stopwords"])),
    infer=_normalizer_types,
    reference=_normalize,
    samples=(
        sample(_DAYS, case_change_action="UPPER", locale="C"),
        sample(_DAYS, stopwords=("monday",), is_case_sensitive=1),
        sample(_DAYS, case_change_action="LOWER", stopwords=("tuesday",), locale="C"),
    ),
)


def _grams_types(call: OpCall) -> Types:
    x, attrs = call.type(0), call.attrs
    indexes, counts = attrs["ngram_indexes"], attrs["ngram_counts"]
    if x.rank not in (1, 2) or not indexes or not counts or min(indexes) < 0:
        raise ShapeError(f"{call.row} takes (C,) or (B, C) and indexes from 0 on, got {x}")
    pool = attrs["pool_strings"] if x.dtype == string else attrs["pool_int64s"]
    if not pool:
        raise InvalidInput(f"{call.row} of {x} needs a pool of its element type")
    if attrs["mode"] not in _WEIGHTS:
        raise InvalidInput(f"the mode of {call.row} must be one of {', '.join(_WEIGHTS)}")
    return (TensorType(float32, (*x.shape[:-1], max(indexes) + 1)),)


_WEIGHTS: Final[Mapping[str, Any]] = {
    "TF": lambda count, weight: count,
    "IDF": lambda count, weight: (count > 0) * weight,
    "TFIDF": lambda count, weight: count * weight,
}


def _pool(
    counts: Sequence[int], pool: Sequence[Any], shortest: int, longest: int
) -> dict[Any, int]:
    """Number the n-grams of the pool, which lists 1-grams, then 2-grams, and so on."""
    places: dict[Any, int] = {}
    number = 0
    # counts[n - 1] is where the n-grams begin in the pool; `number` counts all of them, because
    # ngram_indexes does so too.
    for n, (start, end) in enumerate(pairwise([*counts, len(pool)]), 1):
        for at in range(start, end, n):
            if shortest <= n <= longest:
                places[tuple(pool[at : at + n])] = number
            number += 1
    return places


def _grams(
    x: Any, *, max_gram_length: int, max_skip_count: int, min_gram_length: int, mode: str,
    ngram_counts: Sequence[int], ngram_indexes: Sequence[int], pool_int64s: Any, pool_strings: Any,
    weights: Sequence[float] | None,
) -> Any:  # fmt: skip
    pool = pool_strings if x.dtype == np.object_ else pool_int64s
    known = _pool(ngram_counts, pool, min_gram_length, max_gram_length)
    rows = x.reshape(-1, x.shape[-1]).tolist()
    counted = np.zeros((len(rows), max(ngram_indexes) + 1), np.float32)
    for i, row in enumerate(rows):
        for gram in _with_skips(row, min_gram_length, max_gram_length, max_skip_count):
            if gram in known:
                counted[i, ngram_indexes[known[gram]]] += 1
    scale = np.ones(counted.shape[1], np.float32)
    if weights is not None:
        for place, weight in zip(ngram_indexes, weights, strict=True):
            scale[place] = weight
    return _WEIGHTS[mode](counted, scale).astype(np.float32).reshape((*x.shape[:-1], -1))


def _with_skips(
    row: Sequence[Any], shortest: int, longest: int, most: int
) -> Iterator[tuple[Any, ...]]:
    """Yield every n-gram of items that lie equally far apart, 1 to most + 1; single items once."""
    for skip in range(most + 1):
        for n in range(shortest, longest + 1):
            if n == 1 and skip:
                continue
            for at in range(len(row) - (n - 1) * (skip + 1)):
                yield tuple(row[at : at + (n - 1) * (skip + 1) + 1 : skip + 1])


_GRAMS: Final[Mapping[str, Any]] = {
    "ngram_counts": (0, 4),
    "ngram_indexes": (0, 1, 2, 3, 4, 5, 6),
    "pool_int64s": (2, 3, 5, 4, 5, 6, 7, 8, 6, 7),
    "min_gram_length": 1,
    "max_gram_length": 2,
}
tfidf_vectorizer = Op(
    name="TfIdfVectorizer", kind=OpKind.DATA,
    infer=_grams_types,
    reference=_grams,
    samples=(
        sample(lambda rng: rng.integers(1, 9, (3, 6)), mode="TF", max_skip_count=2, **_GRAMS),
        sample(lambda rng: rng.integers(1, 9, (3, 6)).astype(np.int32), mode="TFIDF",
               max_skip_count=0, weights=(1.0, 2.0, 3.0, 4.0, 0.5, 0.25, 2.0), **_GRAMS),
        sample(words("b", "a", "b"), mode="IDF", max_skip_count=0, ngram_counts=(0,),
               ngram_indexes=(0, 1), pool_strings=("a", "b"), min_gram_length=1,
               max_gram_length=1, weights=(2.0, 3.0)),
    ),
)  # fmt: skip

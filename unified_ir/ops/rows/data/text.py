"""Rows over strings, and over sequences of words or numbers as counts; none has a gradient."""

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
    """A maker of a vector of strings."""
    return fixed(np.array(texts, np.object_))


def _each(f: Any, *arrays: Any) -> Any:
    """`f` of the strings of arrays that broadcast against each other."""
    wide = np.broadcast_arrays(*arrays)
    texts = np.empty(wide[0].shape, np.object_)
    for at in np.ndindex(texts.shape):
        texts[at] = f(*(x[at] for x in wide))
    return texts


string_concat = Op(
    name="StringConcat",
    kind=OpKind.DATA,
    infer=broadcast_same,
    reference=lambda a, b: _each(lambda x, y: x + y, a, b),
    samples=(
        sample(words("a", "é"), words("b", "")),
        sample(fixed(np.array([["x"], ["y"]], np.object_)), words("1", "2", "3")),
    ),
)


def _split_types(call: OpCall) -> Types:
    x = call.type(0)
    return (x.with_shape((*x.shape, call.opened())), x.with_dtype(int64))[: call.outputs]


def _parts(text: str, delimiter: str | None, most: int | None) -> list[str]:
    """As Python splits; by runs of blanks where there is no delimiter."""
    return text.split(delimiter or None, -1 if most is None else most) if text else []


def _split(x: Any, *, delimiter: str | None, maxsplit: int | None) -> tuple[Any, Any]:
    parts = {at: _parts(x[at], delimiter, maxsplit) for at in np.ndindex(x.shape)}
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
"""Parts of each string, padded with empty ones to the most, and how many there are."""


def _pattern(call: OpCall) -> Types:
    automaton(_given_pattern(call.attrs["pattern"]))
    return (call.type(0).with_dtype(bool_),)


def _given_pattern(pattern: str | None) -> str:
    if pattern is None:
        raise InvalidInput("RegexFullMatch needs a pattern")
    return pattern


def _full_match(x: Any, *, pattern: str | None) -> Any:
    held = automaton(_given_pattern(pattern))
    return np.array([held.matches(text) for text in x.reshape(-1)], np.bool_).reshape(x.shape)


regex_full_match = Op(
    name="RegexFullMatch", kind=OpKind.DATA,
    infer=_pattern,
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
        raise InvalidInput(f"{call.row} changes case by {', '.join(_CASES)}, not otherwise")
    return (x.with_shape((*x.shape[:-1], call.opened())) if attrs["stopwords"] else x,)


_CASES: Final[Mapping[str, Any]] = {"NONE": str, "LOWER": str.lower, "UPPER": str.upper}


def _normalize(
    x: Any, *, case_change_action: str, is_case_sensitive: int, stopwords: Sequence[str] | None,
    locale: str | None,
) -> Any:  # fmt: skip
    """Without stop words, in another case; one empty string where nothing is left.

    Cases are Unicode's, whatever the locale; onnxruntime needs one that its machine has.
    """
    stop = set(stopwords or ())
    folded = stop if is_case_sensitive else {word.lower() for word in stop}
    kept = [t for t in x.reshape(-1) if (t if is_case_sensitive else t.lower()) not in folded]
    cased = [_CASES[case_change_action](t) for t in kept] or [""] * bool(stop)
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
        raise ShapeError(f"{call.row} takes (C,) or (B, C) and places from 0 on, got {x}")
    pool = attrs["pool_strings"] if x.dtype == string else attrs["pool_int64s"]
    if not pool:
        raise InvalidInput(f"{call.row} of {x} needs a pool of its element type")
    if attrs["mode"] not in _WEIGHTS:
        raise InvalidInput(f"{call.row} counts by {', '.join(_WEIGHTS)}, not {attrs['mode']!r}")
    return (TensorType(float32, (*x.shape[:-1], max(indexes) + 1)),)


_WEIGHTS: Final[Mapping[str, Any]] = {
    "TF": lambda count, weight: count,
    "IDF": lambda count, weight: (count > 0) * weight,
    "TFIDF": lambda count, weight: count * weight,
}


def _pool(
    counts: Sequence[int], pool: Sequence[Any], shortest: int, longest: int
) -> dict[Any, int]:
    """Number of each n-gram that counts: part n of the pool holds those of n + 1 items."""
    places: dict[Any, int] = {}
    number = 0
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
    """Every n-gram whose items lie 1 to most + 1 apart, equally far; single items once."""
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

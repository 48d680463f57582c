"""Patterns against Python's own engine where it is fast, and where it would take for ever."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ops.rows.data.regex import MAX_STATES, Automaton

PIECES = ["a", "b", "ab", ".", "[ab]", "[^a]", r"\w", r"\d", r"\s", r"\b", "(a|b)", "(?:ab|c)", "x"]
PARTS = st.tuples(
    st.sampled_from(PIECES), st.sampled_from(["", "*", "+", "?", "{2}", "{1,3}", "*?"])
)
TEXTS = st.text(alphabet="abcx1 \n_", max_size=8)


@given(st.lists(PARTS, max_size=6), TEXTS)
def test_matches_are_those_of_python(parts, text):
    pattern = "".join(f"{p}{q}" for p, q in parts if not (p == r"\b" and q))
    assert Automaton(pattern).matches(text) == bool(re.fullmatch(pattern, text, re.ASCII)), pattern


def test_a_pattern_that_ruins_backtracking_takes_linear_time():
    held = Automaton("(a*)*(a+)+(a|a)*b")
    assert not held.matches("a" * 5_000)  # backtracking would outlive the test's limit, and us


@pytest.mark.parametrize(
    "pattern", ["(?:){4000000000}a", "((){4000000000}){4000000000}a", "(?:){0,4000000000}a"]
)
def test_a_part_that_reads_nothing_is_repeated_in_no_time(pattern):
    assert Automaton(pattern).matches("a")


REFUSED = {
    r"(a)\1": "groupref",
    "(?=a)a": "assert",
    "(?i)a(?i:b)": "a flag inside|cannot be read",
    "(a": "cannot be read",
    "((a{1,99}){1,99}){1,99}": f"more than {MAX_STATES} states",
    "a" * 1001: "at most 1000 letters",
}


def test_deep_nesting_is_read_or_refused():
    for depth in (10, 490):
        try:
            assert Automaton("(" * depth + "a" + ")" * depth).matches("a")
        except InvalidInput as error:
            assert depth > 10
            assert error.args


@pytest.mark.parametrize("pattern", REFUSED, ids=lambda p: p[:12])
def test_what_no_automaton_does_is_refused_by_name(pattern):
    with pytest.raises(InvalidInput, match=REFUSED[pattern]):
        Automaton(pattern)

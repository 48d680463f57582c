"""The edits of the mutation search break one rule each and leave a module that can be read."""

import ast
import subprocess
from pathlib import Path

import pytest
from tests.mutation.sites import mutants_of

ROOT = Path(__file__).parents[2]
SOURCE = b'''
def f(a: "int < 3", b=2):
    """Not a < b."""
    if a < b and (
        b not in (1,)
    ):
        raise ValueError(f"{a < b}")
    g(max(a, 1))
    return a + b
'''


def broken(kind):
    return [m.applied(SOURCE) for m in mutants_of("m.py", SOURCE) if m.kind == kind]


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("Lt", b"a < b and", b"a <= b and"),
        ("And", b"a < b and (", b"a < b or ("),
        ("NotIn", b"b not in (1,)", b"b in (1,)"),
        ("raise", b'raise ValueError(f"{a < b}")', b"pass"),
        ("call", b"g(max(a, 1))", b"pass"),
        ("opposite", b"max(", b"min("),
        ("Add", b"a + b", b"a - b"),
    ],
)
def test_one_rule_is_broken_and_nothing_else(kind, before, after):
    assert broken(kind) == [SOURCE.replace(before, after)]


def test_a_condition_is_negated_over_its_lines():
    (text,) = broken("condition")
    assert b"if (not (a < b and (\n        b not in (1,)\n    ))):" in text


def test_every_number_is_raised_by_one_but_none_in_an_annotation():
    assert sorted(m.text for m in mutants_of("m.py", SOURCE) if m.kind == "number") == [
        "2",
        "2",
        "3",
    ]


def test_inputs_for_the_tests_of_an_operator_are_no_rules():
    assert mutants_of("m.py", b"row = Op(samples=(sample(normal(2, 3), axis=1),))") == []


def test_each_broken_module_of_the_product_can_still_be_parsed():
    paths = subprocess.check_output(
        ["git", "ls-files", "edge/serving/*.py", "cloud/fleet/*.py"], cwd=ROOT, text=True
    ).split()
    for path in paths[::4]:
        source = (ROOT / path).read_bytes()
        for mutant in mutants_of(path, source)[::7]:
            ast.parse(mutant.applied(source))
            assert "->" in mutant.shown(source)

"""Code without source, as typed at a prompt: the error says so where a tensor decides."""

from __future__ import annotations

import linecache
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import TensorSpec, graph, nn, ops, trace

X = np.ones(3, np.float32)
SOURCE = """\
class Doubled(nn.Cell):
    def construct(self, x):
        if x.sum() > 0:
            return x * 2
        return x

def doubled(x):
    while x.sum() < 10:
        x = x * 2
    return x

def both(x):
    return (x.sum() > 0) and (x.sum() < 5)

def negated(x):
    return not x.sum() > 0

def between(x):
    return 0 < x.sum() < 5

def chosen(x):
    return x if x.sum() > 0 else -x

def inner(x):
    return (lambda v: v if v.sum() > 0 else -v)(x)

def repeated(x):
    for _ in range(x.sum().cast("int64")):
        x = x * 2
    return x
"""
LINES = {"doubled": 8, "both": 13, "negated": 16, "between": 19, "chosen": 22, "inner": 25,
         "repeated": 28}  # fmt: skip
WAYS_OUT = "put the function into a file and import it, or into a cell of a notebook; or use "


def typed(filename: str) -> dict[str, Any]:
    """Return what SOURCE defines when it runs without a file."""
    names: dict[str, Any] = {"__name__": "__main__", "nn": nn, "ops": ops}
    exec(compile(SOURCE, filename, "exec"), names)
    return names


@pytest.mark.parametrize("name", LINES)
def test_a_statement_on_a_tensor_names_the_missing_source_and_the_ways_out(name: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        graph(typed("<stdin>")[name])(X)
    message = str(raised.value)
    assert f"<stdin>:{LINES[name]}" in message
    assert re.search(rf"'{name}[^']*' \(<stdin>\) cannot be read", message)
    assert WAYS_OUT in message
    assert "@graph" not in message, "the decorator is there and does not help"


def test_a_loop_over_an_open_axis_names_the_missing_source() -> None:
    names: dict[str, Any] = {}
    exec("def total(x):\n    s = 0.0\n    for v in x:\n        s = s + v\n    return s", names)
    with pytest.raises(InvalidInput, match=r"fixed first axis.*'total' .* cannot be read"):
        trace(names["total"], TensorSpec(("N",)))


def test_a_cell_in_a_text_that_is_kept_under_the_same_name_but_is_another_says_so() -> None:
    """Python 3.13 keeps the program of `python -c` as <string>; code in exec() has that name."""
    program = "exec(text)\n"
    linecache.cache["<string>"] = (len(program), None, [program], "<string>")
    try:
        with pytest.raises(InvalidInput, match=r"'Doubled.construct' \(<string>\) cannot be read"):
            typed("<string>")["Doubled"]()(X)
    finally:
        del linecache.cache["<string>"]


def test_a_text_that_is_kept_is_rewritten_as_in_a_notebook() -> None:
    linecache.cache["<cell 1>"] = (len(SOURCE), None, SOURCE.splitlines(keepends=True), "<cell 1>")
    try:
        names = typed("<cell 1>")
        np.testing.assert_array_equal(names["Doubled"]()(X), 2 * X)
        np.testing.assert_array_equal(graph(names["doubled"])(X), 4 * X)
        np.testing.assert_array_equal(graph(names["repeated"])(X), 8 * X)
    finally:
        del linecache.cache["<cell 1>"]


def test_a_number_that_python_asks_for_is_explained_by_itself() -> None:
    names: dict[str, Any] = {}
    exec("def f(x):\n    return x * float(x.sum())", names)
    with pytest.raises(InvalidInput, match=r"float\(\) needs a number at <string>:2.*ops.cast"):
        graph(names["f"])(X)


IMPORTS = "import numpy as np\nfrom triplane.unified_ir import graph, nn, ops\n"
CALL = "print(Doubled()(np.ones(3, np.float32)))\n"


def _standard_input(program: str) -> list[str]:
    return [sys.executable, "-"]


def _interactive(program: str) -> list[str]:
    return [sys.executable, "-i"]


def _command(program: str) -> list[str]:
    return [sys.executable, "-c", program]


@pytest.mark.slow
@pytest.mark.parametrize("command", [_standard_input, _interactive, _command])
def test_interpreters_either_keep_the_source_or_say_what_is_missing(
    command: Callable[[str], list[str]],
) -> None:
    # A prompt ends a class at an empty line.
    program = IMPORTS + SOURCE.partition("def doubled")[0] + CALL
    done = subprocess.run(
        command(program), input=program, capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("[2. 2. 2.]") or (
        "'Doubled.construct' (<st" in done.stderr and WAYS_OUT in done.stderr
    ), done.stderr

"""The text form: one line per node with types, attributes and the user's line."""

import pytest
from tests.ir import graphs
from tests.ir.graphs import SMALL, small

from triplane.unified_ir.ir.graph import Function, Value
from triplane.unified_ir.ir.text import function_text, module_text
from triplane.unified_ir.ir.types import TensorSpec


def test_a_function_reads_as_written():
    assert function_text(small()) == SMALL


def test_big_constants_show_type_and_digest():
    text = module_text(graphs.module())
    assert "Constant() {value=float32[400] #" in text
    assert "{value=int64[1] {0}}" in text
    assert max(map(len, text.splitlines())) < 200


def test_regions_are_indented_below_their_node():
    lines = function_text(graphs.WITH_REGIONS["nested"]()).splitlines()
    at = next(i for i, line in enumerate(lines) if "triplane.Loop(" in line)
    assert lines[at + 1] == "    region loop("
    assert "      %6: float32[2,3] = triplane.Cond(%5, %x2, %capture0) {" in "\n".join(lines)
    assert lines[-1] == "}"


def test_a_module_lists_properties_entries_and_state_with_roles():
    lines = module_text(graphs.module()).splitlines()
    assert lines[:10] == [
        "module",
        '  meta cell = "tests"',
        '  meta classes = "a\\nb\\nc"',
        "  entry predict = predict",
        "  entry train_step = step",
        "  state w: float32[4,3] parameter",
        "  state user.head: float32[3] personal",
        "  state steps: int64[] buffer",
        "  state w.momentum: float32[4,3] optimizer",
        "  state key: uint32[2] key",
    ]


@pytest.mark.parametrize("params", [0, 1])
def test_functions_without_parameters_or_nodes_have_text(params):
    values = tuple(Value(TensorSpec(()), f"x{i}") for i in range(params))
    names = tuple(f"y{i}" for i in range(params))
    text = function_text(Function("f", values, values, names, ()))
    assert text.startswith("function f(")
    assert text.endswith("}")


def test_nodes_carry_the_line_of_the_user():
    text = function_text(graphs.WITH_REGIONS["scan"]())
    assert "# tests/ir/graphs.py:" in text or "# graphs.py:" in text

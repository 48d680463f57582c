"""Facts about operators stand in their rows; no module outside `ops` keeps a list of names."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from triplane.unified_ir.ir import Node, TensorSpec, Value
from triplane.unified_ir.ops.row import DENSE_FLOPS, Cost
from triplane.unified_ir.ops.table import TABLE, row_of

ROOT = Path(__file__).parents[2]
PACKAGES = ("proto", "unified_ir", "cloud", "edge", "device")
NAMES = {name for _, name in TABLE}
MOST = 2
"""Names of operators that one literal outside `ops` may hold."""

# fmt: off
ALLOWED = {
    "unified_ir/convert/residency.py": "kernels that onnxruntime makes, by its names",
    "unified_ir/onnx/agreeing.py": "where nodes of a file may have sizes that differ",
    "unified_ir/onnx/branches.py": "ONNX's own loops, whose nodes differ from ours",
    "unified_ir/onnx/fold.py": "arithmetic on sizes, as nodes of a file compute them",
    "unified_ir/onnx/lift.py": "older definitions of ONNX",
    "unified_ir/onnx/newer.py": "newer definitions of ONNX",
    "unified_ir/onnx/structure.py": "nodes of a file that become no node",
}
# fmt: on


def name_in(key):
    """The string of a key, or the second of a pair (domain, name)."""
    if isinstance(key, ast.Tuple) and len(key.elts) == 2:
        key = key.elts[1]
    return key.value if isinstance(key, ast.Constant) else None


def literals(tree):
    """Elements of sets, lists and tuples, keys of mappings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            yield node.lineno, node.keys
        elif isinstance(node, (ast.Set, ast.List, ast.Tuple)):
            yield node.lineno, node.elts


def listed(path):
    """Names of operators in the literal collections of a module, by line."""
    for line, keys in literals(ast.parse(path.read_text(encoding="utf-8"))):
        names = {name_in(key) for key in keys if key is not None} & NAMES
        if len(names) > MOST:
            yield line, sorted(names)


def modules():
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if (ROOT / "unified_ir" / "ops") not in path.parents:
                yield path


def test_no_module_outside_ops_keeps_a_list_of_operators():
    holders = {str(p.relative_to(ROOT)): found for p in modules() if (found := list(listed(p)))}
    extra = {path: found for path, found in holders.items() if path not in ALLOWED}
    assert not extra, f"state the fact in a column of the rows (ops/row.py) instead: {extra}"
    assert holders.keys() == ALLOWED.keys(), "entries of ALLOWED that are not needed any more"


@pytest.mark.parametrize("row", TABLE.values(), ids=str)
def test_columns_number_operands_that_exist(row):
    fewest, most = row.arity
    for column in (row.weights, row.buffers, row.settings):
        assert all(0 <= i < most for i in column), f"{row} takes {fewest} to {most} operands"
    assert not {*row.weights} & {*row.buffers} | {*row.weights} & {*row.settings}


def elements(value):
    """Bytes of a value, were each element one byte."""
    return value.type.size


def only_flops(node, size):
    return Cost(7, size(node.outputs[0]))


def test_a_row_may_state_a_cost_of_its_own():
    x, y = (Value(TensorSpec((2, 3))) for _ in "xy")
    relu, matmul = TABLE["", "Relu"], TABLE["", "MatMul"]
    node = Node(relu.id, (x,), (y,))
    assert row_of(node).cost_of(node, elements) == Cost(12, 12)
    assert matmul.cost_of(node, elements) == Cost(12 * DENSE_FLOPS, 12)
    assert replace(relu, cost=only_flops).cost_of(node, elements) == Cost(7, 6)
